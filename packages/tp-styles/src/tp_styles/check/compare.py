"""Comparison of a sharded run with one of the original: outputs, then gradients, then buffers.

Findings of a check: the verdict of one comparison, the lines of a report, and the problems of an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tp_styles._shared.execution_check import Compared, relative_error
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.check.inputs import Copies, Place, tensors_in, varied
from tp_styles.check.runs import Run
from tp_styles.problems import Problem
from tp_styles.runtime.parameters import split_of
from tp_styles.runtime.redistribute import TPGroup


@dataclass(frozen=True)
class Difference:
    """A value not equal in both runs.

    Attributes:
        kind: `"raises"`, `"output"`, `"attribute"`, `"gradient"`, `"input-gradient"`, `"buffer"` or `"shard-leaves"`.
        name: Name of the value.
        error: The largest difference, relative to the largest value.
        detail: Further details.
    """

    kind: str
    name: str
    error: float
    detail: str = ""


@dataclass
class Comparison:
    """Rules for comparing two runs, and counts of compared values.

    Attributes:
        axis: The ranks.
        partial: A style outputs a partial sum.
        may_leave: An output may be a shard in a plain tensor.
        only_first: Outputs other than the first may be anything: internal to a region (attention weights of heads).
        tolerance: Largest accepted relative error.
        compared: Counts.
        blank: Names of values that are zero in both runs, up to the tolerance: a mistake in one would not show.
    """

    axis: TPGroup
    partial: bool
    may_leave: bool
    only_first: bool
    tolerance: float = 0.0
    compared: Compared = field(default_factory=Compared)
    blank: list[str] = field(default_factory=list)

    def count(self, name: str, value: torch.Tensor, size: float, *, gradient: bool = False) -> None:
        """Count a compared value; one whose largest element, of all ranks, is zero is listed as blank."""
        if size > 0 or not value.numel():
            self.compared.add(value, gradient=gradient)
        else:
            self.blank.append(name)

    def outputs(self, sharded: Run, reference: Run) -> tuple[list[Difference], list[Output]]:
        """Return differences of outputs and written tensors, and outputs for the backward."""
        ours, wanted = [*tensors_in(sharded.output)], [*tensors_in(reference.output)]
        count = len(ours)
        own = {name: _meta(x) for name, x in sharded.written.items() if name in reference.written}
        everyone = self.axis.all_gather_objects(([_meta(x) for _, x in ours], own), "the check")  # all in one message
        if {len(metas) for metas, _ in everyone} != {len(wanted)}:  # on any rank
            return [Difference("output", "structure", math.inf, f"{count} tensors, {len(wanted)} originally")], []
        written = [name for name in everyone[0][1] if all(name in metas for _, metas in everyone)]  # in rank 0's order
        ours += [(Place(name, 0), sharded.written[name]) for name in written]
        wanted += [(Place(name, 0), reference.written[name]) for name in written]
        shapes = [[*metas, *(of_written[name] for name in written)] for metas, of_written in everyone]
        differences: list[Difference] = []
        outputs: list[Output] = []
        for index, ((place, actual), (_, other)) in enumerate(zip(ours, wanted, strict=True)):
            is_output = index < count
            kind = "output" if is_output else "attribute"
            name = "-> output" + (place.path or (f" {index}" if count > 1 else "")) if is_output else place.path
            layout = _layout(actual, other, [shape[index] for shape in shapes])
            if layout is None:  # neither full nor a shard
                if is_output and not (self.only_first and index) and not place.is_state:
                    differences.append(
                        Difference(
                            "output",
                            name,
                            math.inf,
                            f"shape {tuple(actual.shape)} on rank {self.axis.rank}, {tuple(other.shape)} originally",
                        )
                    )
                continue
            is_shard = isinstance(layout, Shard) and not isinstance(actual, DTensor)
            if is_shard and is_output and not self.may_leave and not place.is_state:
                differences.append(
                    Difference("shard-leaves", name, math.inf, f"{tuple(actual.shape)} of {tuple(other.shape)}")
                )
                continue
            full = self.gathered(actual.detach(), layout, [shape[index][0] for shape in shapes])
            difference = error(full, other.detach())
            if self.partial and self._max(difference) > self.tolerance:  # the maximum: all ranks enter
                total = self.axis.all_reduce(actual.detach().contiguous())
                if self._max(error(total, other.detach())) <= self.tolerance:
                    difference, layout = 0.0, "partial"
            if difference > self.tolerance:
                differences.append(Difference(kind, name, difference))
            self.count(name, full, largest(full_of(other)))
            # No gradient flows through a cache passed on to the next call.
            starts = not place.is_state and not any(word in place.path for word in ("past", "cache"))
            outputs.append(
                Output(actual, other, layout, [shape[index][0] for shape in shapes], is_output, starts, place.path)
            )
        return differences, outputs

    def first_difference(self, sharded: Run, reference: Run) -> str:
        """Return the first module with another full output in two traced runs, `""` for none."""
        take = getattr(vars(sharded.module).get("forward"), "take_tokens", None)  # of modules on shards of a sequence
        different = [
            name
            for name, others in reference.trace.outputs.items()
            for actual, full in zip(sharded.trace.outputs.get(name, ()), others, strict=False)
            if type(actual) is type(full) is torch.Tensor
            and actual.shape == (other := full if take is None or actual.shape == full.shape else take(full)).shape
            and error(actual, other) > self.tolerance
        ]
        everyone = self.axis.all_gather_objects(different[:1], "the check")
        order = [*reference.trace.outputs]  # a mistake on one rank shows later on the others
        return min((names[0] for names in everyone if names), key=order.index, default="")

    def _max(self, value: float) -> float:
        values = self.axis.all_gather_objects(value, "the check")
        return float(max(values))

    def gathered(self, x: torch.Tensor, layout: Any, shapes: list[tuple[int, ...]]) -> torch.Tensor:
        """Return the global tensor."""
        if isinstance(layout, Shard) and not isinstance(x, DTensor):
            return self.axis.all_gather(x, layout.dim, [shape[layout.dim] for shape in shapes])
        return full_of(x)

    def gradients(self, sharded: Run, reference: Run, ours: Copies, wanted: Copies) -> list[Difference]:
        """Return differences of gradients of inputs and parameters, after both backwards."""
        pairs: list[GradientPair] = []
        for index, (actual, other) in enumerate(zip(ours.leaves, wanted.leaves, strict=True)):
            if other.grad is not None:
                gradient = actual.grad if actual.grad is not None else torch.zeros_like(actual)
                layout = ours.layouts[index]
                shapes = self.axis.all_gather_objects(tuple(actual.shape), "the check")
                full = self.gathered(gradient, layout, shapes)
                pairs.append(
                    GradientPair("input-gradient", f"input {index}", full, other.grad, largest(full_of(other.grad)))
                )
        # A shard has several copies in the reference if modules sharded by another call hold it too.
        copies: dict[int, dict[int, tuple[Any, torch.Tensor]]] = {}
        for key, copy in reference.parameters.items():
            if copy.requires_grad:
                copies.setdefault(id(sharded.parameters[key]), {}).setdefault(id(copy), (key, copy))
            elif copy.is_floating_point():
                self.blank.append(".".join(filter(None, key)))  # frozen now, but not for ever
        for found_copies in copies.values():
            (key, _), *_ = found_copies.values()
            both = [self._gradients(sharded.parameters[key], copy) for _, copy in found_copies.values()]
            total = sum((other for _, other, _ in both[1:]), both[0][1])
            size = max(size for _, _, size in both)
            pairs.append(GradientPair("gradient", ".".join(filter(None, key)), both[0][0], total, size))
        # True zeros (the bias of keys before a softmax) are noise in both runs: the floor compares it to other ones.
        floor = 1e-2 * max((pair.size for pair in pairs), default=0.0)
        for pair in pairs:
            self.count(pair.name, pair.value, max(0.0, pair.size - floor * self.tolerance), gradient=True)
        return gradient_differences(pairs, self.tolerance, floor)

    def _gradients(self, shard: torch.Tensor, copy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return this rank's gradient, the original's for the same elements, and the largest of the original's."""
        wanted = full_of(copy.grad) if copy.grad is not None else torch.zeros_like(copy)  # unused here: zero
        size = largest(wanted)
        gradient = shard.grad if shard.grad is not None else torch.zeros_like(shard)
        if isinstance(gradient, DTensor):
            return gradient.full_tensor(), full_of(wanted), size
        gradient = gradient.detach().as_subclass(torch.Tensor)
        info = sharding_info_of(shard)
        if info is not None and gradient.shape != wanted.shape:
            wanted = split_of(info).take(wanted, self.axis.rank, self.axis.size)
        return gradient, wanted, size

    def buffers(self, sharded: Run, reference: Run) -> list[Difference]:
        """Return differences of buffers of one shape."""
        differences = []
        for key, wanted in reference.buffers.items():
            actual = sharded.buffers.get(key)
            if actual is not None and actual.shape == wanted.shape and not isinstance(actual, DTensor):
                difference = error(actual, wanted)
                self.count(".".join(filter(None, key)), actual, largest(full_of(wanted)))
                if difference > self.tolerance:
                    differences.append(Difference("buffer", ".".join(filter(None, key)), difference))
        return differences


@dataclass(frozen=True)
class GradientPair:
    """A gradient of both runs.

    Attributes:
        kind: `"gradient"` or `"input-gradient"`.
        name: Name of the parameter or input.
        value: This rank's, or the full one.
        wanted: The original's, of the same elements.
        size: The largest element of the original's on all ranks.
    """

    kind: str
    name: str
    value: torch.Tensor
    wanted: torch.Tensor
    size: float


def gradient_differences(pairs: list[GradientPair], tolerance: float, floor: float) -> list[Difference]:
    """Return differences of gradients, relative to the largest element of each, or to `floor`."""
    differences = []
    for pair in pairs:
        difference = error(pair.value, pair.wanted, floor=floor)
        if tolerance > ONE_RANKS_PART and difference <= tolerance:
            # In bfloat16 one element may be off by 0.6. Over all elements rounding cancels, a missing sum does not.
            norm_floor = floor * math.sqrt(pair.wanted.numel())
            spread = relative_error(pair.value, full_of(pair.wanted), floor=norm_floor, any_dtype=True)
            difference = spread if spread > ONE_RANKS_PART else 0.0
        else:
            difference = difference if difference > tolerance else 0.0
        if difference:
            differences.append(Difference(pair.kind, pair.name, difference))
    return differences


# Norm of a difference, relative to the gradient's: of two independent halves of a sum each is off by 0.7.
ONE_RANKS_PART = 0.4


def _meta(x: torch.Tensor) -> tuple[tuple[int, ...], bool]:
    return tuple(x.shape), isinstance(x, DTensor)


def full_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's global value."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@dataclass
class Output:
    """One output of both runs, with the layout of the sharded one."""

    sharded: torch.Tensor
    reference: torch.Tensor
    layout: Any
    shapes: list[tuple[int, ...]]
    is_output: bool = True
    starts_backward: bool = True
    path: str = ""

    @property
    def is_local_shard(self) -> bool:
        """True for features of one rank in a plain tensor."""
        is_plain = self.is_output and not isinstance(self.sharded, DTensor)
        return is_plain and self.layout == Shard(self.sharded.dim() - 1)


def cotangents(outputs: list[Output], axis: TPGroup) -> tuple[list[Any], list[Any]]:
    """Return [outputs, gradients] of the sharded run and of the reference."""
    ours: list[Any] = [[], []]
    wanted: list[Any] = [[], []]
    for output in outputs:
        reference = output.reference
        value = varied(reference)
        if not (output.starts_backward and output.sharded.requires_grad and reference.requires_grad):
            continue
        wanted[0].append(reference)
        wanted[1].append(_like(value, reference))
        ours[0].append(output.sharded)
        if isinstance(output.sharded, DTensor):
            ours[1].append(_like(value, output.sharded))
        elif isinstance(output.layout, Shard):
            dim = output.layout.dim
            ours[1].append(axis.slice(value, dim, [shape[dim] for shape in output.shapes]).contiguous())
        else:
            ours[1].append(value)
    return ours, wanted


def _like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return value
    placements = [p if isinstance(p, Shard) else Replicate() for p in like.placements]  # a partial sum's: full
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


def error(actual: torch.Tensor, other: torch.Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value of `other` (and `floor`)."""
    other = full_of(other)
    return relative_error(actual, other, norm=math.inf, floor=floor, any_dtype=True)


def largest(x: torch.Tensor) -> float:
    """Return the largest finite absolute value, 0 for an empty tensor."""
    x = x.detach()
    x = torch.view_as_real(x) if x.is_complex() else x
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def _layout(actual: torch.Tensor, other: torch.Tensor, metas: list[tuple[tuple[int, ...], bool]]) -> Any:
    """Return this rank's layout within the original output: `"full"`, `Shard(dim)`, or None for neither."""
    wanted = tuple(other.shape)
    if isinstance(actual, DTensor):
        if tuple(actual.shape) != wanted:
            return None
        return next((p for p in actual.placements if isinstance(p, Shard)), "full")
    shapes = [shape for shape, _ in metas]
    if all(shape == wanted for shape in shapes):
        return "full"
    if any(len(shape) != len(wanted) for shape in shapes):
        return None
    dims = [dim for dim in range(len(wanted)) if any(shape[dim] != wanted[dim] for shape in shapes)]
    if len(dims) == 1 and sum(shape[dims[0]] for shape in shapes) == wanted[dims[0]]:
        return Shard(dims[0])
    return None


ALIKE = "all of its input values are equal, which may hide a mistake; the next call with other values is checked"


class Stage(IntEnum):
    """Last completed step of a comparison."""

    NOTHING = 0
    SHARDED = 1
    OUTPUTS = 2
    SHARDED_BACKWARD = 3
    ALL = 4


@dataclass
class Verdict:
    """One comparison of both runs; the same on every rank.

    Attributes:
        stage: The last completed step.
        differences: Unequal values.
        is_closed: Outputs are full, so a region around this one may use them as the original's.
        failure: The error that ended it early.
        place: First module with another output.
        compared: Counts of compared values.
        blank: Names of values that are zero in both runs, or parameters without a gradient: nothing was compared.
        is_constant: Inputs of one value went into both runs, and may hide a mistake.
        local: Places of outputs that are shards in plain tensors, on their last dim.
    """

    stage: Stage = Stage.NOTHING
    differences: list[Difference] = field(default_factory=list)
    is_closed: bool = False
    failure: str = ""
    place: str = ""
    compared: Compared = field(default_factory=Compared)
    blank: list[str] = field(default_factory=list)
    is_constant: bool = False
    local: tuple[str, ...] = ()

    def failed(self, failure: str) -> Verdict:
        """Return the verdict, ended by an error."""
        step = ("the sharded run", "the original", "the sharded backward", "the original's backward")[self.stage]
        self.failure = f"{step} raised {failure}"
        return self

    @property
    def raises(self) -> bool:
        """True if only the sharded run raises, which other numbers or another type may mend."""
        return any(difference.kind == "raises" for difference in self.differences)

    @property
    def is_final(self) -> bool:
        """True if no run with other numbers, or in another type, is needed."""
        return self.stage == Stage.ALL or (bool(self.differences) and not self.raises)

    @property
    def reason(self) -> str:
        """The reason against a comparison; `""` if there was one."""
        if not self.failure and self.stage >= Stage.OUTPUTS and not self.compared:
            return "its forward returns and keeps no tensors that could be compared"
        return self.failure or (ALIKE if self.is_constant and self.stage >= Stage.OUTPUTS else "")

    def __str__(self) -> str:
        if self.reason:
            return f"unchecked: {self.reason}"
        more = f" and {len(self.blank) - 8} more" if len(self.blank) > 8 else ""
        zeros = f"; unchecked, zero or without a gradient in both runs: {', '.join(self.blank[:8])}{more}"
        return f"equal to the original ({self.compared}){zeros if self.blank else ''}"


HINTS = {
    "output": "FusedColwiseParallel where a weight has several sections (q, k, v; gate, up); local head counts"
    " (GQAParallel, or view(..., -1, head_size)) where heads are divided; ColwiseParallel(output_layouts=Replicate())"
    " for what needs all features",
    "gradient": "each rank has a partial sum of this gradient: NoParallel(sum_gradient=True) for its module (norms= of"
    " GQAParallel), or a style that shards it",
    "input-gradient": "the ranks' gradients of the input are not summed: a module takes a shard's part of it unstyled",
    "raises": "a layer after a column-wise one takes its shard: RowwiseParallel() for it, or"
    " ColwiseParallel(output_layouts=Replicate()) for the one before; RowwiseParallel(input_layouts=Replicate())"
    " for a full input; local sizes where code has numbers of its own; BlockParallel(shard={name: dim}) for a module's"
    " own parameter of each head or channel (sinks, scales of [heads, 1, 1])",
    "cache": "a filled key-value cache comes in with all heads (prefix tuning of peft makes one), where a rank's cache"
    " holds its own: PromptTuningConfig and LoRA are right",
    "buffer": "each rank updates it from its own shard",
    "attribute": "the forward leaves it behind, computed from one rank's shard: compute it from full outputs, or reduce"
    " it over the tensor-parallel ranks",
    "shard-leaves": "every rank would go on with its own features: output_layouts=Replicate() gives full outputs;"
    " output_layouts=Shard(-1) declares that shards are meant (vocab_parallel_cross_entropy takes them); attention"
    " weights are of this rank's heads: all of them come after undo()",
}


def problem(
    scope: str,
    difference: Difference,
    place: str,
    *,
    unstyled: frozenset[str],
    has_cache: bool,
    hints: dict[str, str] | None,
) -> Problem:
    """Return the problem of a difference in a scope, with its remedy."""
    name = (
        f"{scope} {difference.name}" if "output" in difference.name or "input" in difference.name else difference.name
    )
    code = {"shard-leaves": "shard-leaves", "raises": "check-raises"}.get(difference.kind, "check-mismatch")
    reason = f"{difference.kind} differs from the original module's by {difference.error:.2g} (run on full weights)"
    reason = f"{difference.kind}: {difference.detail}, run on full weights" if difference.detail else reason
    reason += f"; both part first at the output of {place}" if difference.kind == "output" and place else ""
    if difference.kind == "shard-leaves":
        reason = f"a shard leaves the model as a plain tensor: {difference.detail}"
    if difference.kind == "raises":
        name, reason = difference.name or name, f"{difference.detail}; the original, on full weights, runs"
    hint = (hints or HINTS)["cache" if difference.kind == "raises" and has_cache else difference.kind]
    if "mixed torch.Tensor and DTensor" in difference.detail:
        hint = (
            "one of both is a DTensor: PrepareModuleInput(use_local_output=True) for plain parameters; a style of"
            " your own that makes DTensors of parameters prepares the inputs too (distribute_module(input_fn=...))"
        )
    if difference.kind == "gradient" and difference.name not in unstyled and hints is None:
        hint = "the forward uses this parameter other than its style expects: as a bare weight, or on other inputs"
    return Problem(code, name, found=f"in region {scope!r}: {reason}", hint=hint + '; check="never" skips the check')
