"""Comparison of a sharded run with one of the original: outputs, then gradients, then buffers.

Of its rows follow the verdict of a check, the lines of its report, and the problems of an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.check.inputs import Copies, Place, tensors_in, varied
from tp_styles.check.rows import Pair, Row, counts, error, full_of, gradient_rows, largest
from tp_styles.check.runs import Run
from tp_styles.problems import Problem
from tp_styles.runtime.parameters import split_of
from tp_styles.runtime.redistribute import TPGroup


@dataclass
class Comparison:
    """Rules for comparing two runs, and a row for each value.

    Attributes:
        axis: The ranks.
        partial: A style outputs a partial sum.
        may_leave: An output may be a shard in a plain tensor.
        only_first: Outputs other than the first may be anything: internal to a region (attention weights of heads).
        tolerance: Largest accepted relative error.
        rows: One for each value of this rank.
    """

    axis: TPGroup
    partial: bool
    may_leave: bool
    only_first: bool
    tolerance: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def outputs(self, sharded: Run, reference: Run) -> list[Output]:
        """Compare outputs and written tensors; return outputs for the backward."""
        ours, wanted = [*tensors_in(sharded.output)], [*tensors_in(reference.output)]
        count = len(ours)
        own = {name: tuple(x.shape) for name, x in sharded.written.items() if name in reference.written}
        everyone = self.axis.all_gather_objects(
            ([tuple(x.shape) for _, x in ours], own, [x.requires_grad for _, x in ours]), "the check"
        )  # all in one message
        if {len(metas) for metas, *_ in everyone} != {len(wanted)}:  # on any rank
            self.rows.append(Row("output", "structure", reason=f"{count} tensors, {len(wanted)} originally"))
            return []
        # In rank 0's order: each rank has noted its own.
        written = [name for name in everyone[0][1] if all(name in metas for _, metas, _ in everyone)]
        ours += [(Place(name, 0), sharded.written[name]) for name in written]
        wanted += [(Place(name, 0), reference.written[name]) for name in written]
        shapes = [[*metas, *(of_written[name] for name in written)] for metas, of_written, _ in everyone]
        outputs: list[Output] = []
        for index, ((place, actual), (_, other)) in enumerate(zip(ours, wanted, strict=True)):
            is_output = index < count
            kind = "output" if is_output else "attribute"
            name = "-> output" + (place.path or (f" {index}" if count > 1 else "")) if is_output else place.path
            local = [shape[index] for shape in shapes]
            layout = layout_of(actual, tuple(other.shape), local)
            if layout is None:  # neither full nor a shard
                if is_output and not (self.only_first and index) and not place.is_state:
                    reason = f"shape {tuple(actual.shape)} on rank {self.axis.rank}, {tuple(other.shape)} originally"
                    self.rows.append(Row("output", name, reason=reason))
                continue
            is_shard = isinstance(layout, Shard) and not isinstance(actual, DTensor)
            if is_shard and is_output and not self.may_leave and not place.is_state:
                self.rows.append(Row("shard-leaves", name, reason=f"{tuple(actual.shape)} of {tuple(other.shape)}"))
                continue
            full, original = self.gathered(actual.detach(), layout, local), full_of(other.detach())
            if self.partial and self._max(error(full, original)) > self.tolerance:  # the maximum: all ranks enter
                total = self.axis.all_reduce(actual.detach().contiguous())
                if self._max(error(total, original)) <= self.tolerance:
                    full, layout = total, "partial"
            self.rows.append(Pair(kind, name, full, original, largest(original)).row(self.tolerance))
            # No gradient flows through a cache passed on to the next call.
            starts = not place.is_state and not any(word in place.path for word in ("past", "cache"))
            if is_output and starts and not (self.only_first and index):
                self.rows += gradient_lost(name, [flags[index] for *_, flags in everyone], other)
            start = sum(shape[layout.dim] for shape in local[: self.axis.rank]) if is_shard else 0
            outputs.append(Output(actual, other, layout, start, is_output, starts, place.path))
        return outputs

    def first_difference(self, sharded: Run, reference: Run) -> str:
        """Return the first module with another full output in two traced runs, `""` for none."""
        take = getattr(vars(sharded.module).get("forward"), "take_tokens", None)  # of modules on shards of a sequence
        equal: dict[str, bool] = {}
        for name, others in reference.trace.outputs.items():
            for actual, full in zip(sharded.trace.outputs.get(name, ()), others, strict=False):
                if type(actual) is type(full) is torch.Tensor:
                    other = full if take is None or actual.shape == full.shape else take(full)
                    if actual.shape == other.shape:
                        equal[name] = equal.get(name, True) and error(actual, other) <= self.tolerance
        return first_different([*reference.trace.outputs], self.axis.all_gather_objects(equal, "the check"))

    def _max(self, value: float) -> float:
        return float(max(self.axis.all_gather_objects(value, "the check")))

    def gathered(self, x: torch.Tensor, layout: Any, shapes: list[tuple[int, ...]] | None = None) -> torch.Tensor:
        """Return the global tensor; a collective, with the shapes of all ranks if they are known."""
        if isinstance(layout, Shard) and not isinstance(x, DTensor):
            shapes = shapes or self.axis.all_gather_objects(tuple(x.shape), "the check")
            return self.axis.all_gather(x, layout.dim, [shape[layout.dim] for shape in shapes])
        return full_of(x)

    def gradients(self, sharded: Run, reference: Run, ours: Copies, wanted: Copies) -> None:
        """Compare gradients of inputs and parameters, after both backwards."""
        pairs: list[Pair] = []
        for index, (actual, other) in enumerate(zip(ours.leaves, wanted.leaves, strict=True)):
            if other.grad is not None:
                gradient = actual.grad if actual.grad is not None else torch.zeros_like(actual)
                full = self.gathered(gradient, ours.layouts[index])  # declared layouts: the same on all ranks
                original = full_of(other.grad)
                pairs.append(Pair("input-gradient", f"input {index}", full, original, largest(original)))
        # A shard has several copies in the reference if modules sharded by another call hold it too.
        copies: dict[int, dict[int, tuple[Any, torch.Tensor]]] = {}
        for key, copy in reference.parameters.items():
            if copy.requires_grad:
                copies.setdefault(id(sharded.parameters[key]), {}).setdefault(id(copy), (key, copy))
            elif copy.is_floating_point():
                name = ".".join(filter(None, key))  # frozen now, but not for ever
                self.rows.append(Row("gradient", name, "unchecked", reason="without a gradient"))
        for found_copies in copies.values():
            (key, _), *_ = found_copies.values()
            both = [self._gradients(sharded.parameters[key], copy) for _, copy in found_copies.values()]
            total = sum((other for _, other, _ in both[1:]), both[0][1])
            size = max(size for _, _, size in both)
            pairs.append(Pair("gradient", ".".join(filter(None, key)), both[0][0], total, size))
        self.rows += gradient_rows(pairs, self.tolerance)

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

    def buffers(self, sharded: Run, reference: Run) -> None:
        """Compare buffers of one shape."""
        for key, wanted in reference.buffers.items():
            actual = sharded.buffers.get(key)
            if actual is not None and actual.shape == wanted.shape and not isinstance(actual, DTensor):
                full = full_of(wanted)
                pair = Pair("buffer", ".".join(filter(None, key)), actual, full, largest(full))
                self.rows.append(pair.row(self.tolerance))


@dataclass
class Output:
    """One output of both runs.

    Attributes:
        sharded: The sharded run's.
        reference: The original's, full.
        layout: `"full"`, `"partial"`, or the shard that `sharded` is.
        start: Index of the shard's first element along its dim.
        is_output: The module returns it; otherwise it is left in an attribute.
        starts_backward: Gradients flow through it.
        path: Its place in the output.
        first_row: First of this rank's rows, where ranks have rows of their own; None otherwise.
    """

    sharded: torch.Tensor
    reference: torch.Tensor
    layout: Any
    start: int = 0
    is_output: bool = True
    starts_backward: bool = True
    path: str = ""
    first_row: int | None = None

    @property
    def is_local_shard(self) -> bool:
        """True for features of one rank in a plain tensor."""
        is_plain = self.is_output and not isinstance(self.sharded, DTensor)
        return is_plain and self.layout == Shard(self.sharded.dim() - 1)

    def cotangent(self, scale: int) -> torch.Tensor:
        """Return the gradient of the sharded output; rows of a rank count `scale` times, as gradients are averaged."""
        value = varied(self.reference)
        if self.first_row is not None:
            value = value.narrow(0, self.first_row, self.reference.shape[0] // scale) * scale
        if isinstance(self.layout, Shard) and not isinstance(self.sharded, DTensor):
            dim = self.layout.dim
            value = value.narrow(dim, self.start, self.sharded.shape[dim]).contiguous()
        return _like(value, self.sharded)


def gradient_lost(name: str, flags: list[bool], original: torch.Tensor) -> list[Row]:
    """Return a row for an output that is detached on some rank or in the original alone: no backward would show it.

    Args:
        name: The output.
        flags: Of each rank, whether its output takes a gradient.
        original: The original's output.
    """
    ranks = [rank for rank, flag in enumerate(flags) if flag != original.requires_grad]
    if not ranks:
        return []
    has, had = ("without", "with") if original.requires_grad else ("with", "without")
    return [Row("output", name, reason=f"{has} a gradient on rank {ranks[0]}, {had} one originally")]


def cotangents(outputs: list[Output], scale: int = 1) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (outputs, gradients) of the sharded run and of the reference."""
    starts = [
        output
        for output in outputs
        if output.starts_backward and output.sharded.requires_grad and output.reference.requires_grad
    ]
    ours = [output.sharded for output in starts], [output.cotangent(scale) for output in starts]
    wanted = [output.reference for output in starts]
    return ours, (wanted, [_like(varied(x), x) for x in wanted])


def _like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return value
    placements = [p if isinstance(p, Shard) else Replicate() for p in like.placements]  # a partial sum's: full
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


def first_different(order: list[str], everyone: list[dict[str, bool]]) -> str:
    """Return the first module with another output on some rank, `""` for none.

    Inside of a block, outputs may be partial sums or heads of a rank: an equal module around it clears them.

    Args:
        order: Names of modules, in the order in which they end: a mistake on one rank shows later on the others.
        everyone: Name -> True if its output is equal, of each rank.
    """
    seen = {name: all(equal[name] for equal in everyone if name in equal) for name in set().union(*everyone)}
    for name in order:
        around = (outer for outer in seen if outer != name and (not outer or name.startswith(f"{outer}.")))
        if not seen.get(name, True) and not any(seen[outer] for outer in around):
            return name
    return ""


def layout_of(actual: torch.Tensor, wanted: tuple[int, ...], shapes: list[tuple[int, ...]]) -> Any:
    """Return this rank's layout within a full tensor: `"full"`, `Shard(dim)`, or None for neither.

    Args:
        actual: This rank's tensor.
        wanted: Shape of the full one.
        shapes: Shapes of all ranks' tensors.
    """
    if isinstance(actual, DTensor):
        if tuple(actual.shape) != wanted:
            return None
        return next((p for p in actual.placements if isinstance(p, Shard)), "full")
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
        rows: The rows of this rank; counts are of these.
        joined: The rows of all ranks: differences, and values that some rank has not compared.
        is_closed: Outputs are full, so a region around this one may use them as the original's.
        failure: The error that ended it early.
        place: First module with another output.
        is_constant: Inputs of one value went into both runs, and may hide a mistake.
        local: Places of outputs that are shards in plain tensors, on their last dim.
    """

    stage: Stage = Stage.NOTHING
    rows: list[Row] = field(default_factory=list)
    joined: list[Row] = field(default_factory=list)
    is_closed: bool = False
    failure: str = ""
    place: str = ""
    is_constant: bool = False
    local: tuple[str, ...] = ()

    def failed(self, failure: str) -> Verdict:
        """Return the verdict, ended by an error."""
        step = ("the sharded run", "the original", "the sharded backward", "the original's backward")[self.stage]
        self.failure = f"{step} raised {failure}"
        return self

    @property
    def differences(self) -> list[Row]:
        """Return the unequal values of all ranks."""
        return [row for row in self.joined if row.verdict == "differs"]

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
        if not self.failure and self.stage >= Stage.OUTPUTS and not counts(self.rows):
            return "its forward returns and keeps no tensors that could be compared"
        return self.failure or (ALIKE if self.is_constant and self.stage >= Stage.OUTPUTS else "")

    def __str__(self) -> str:
        if self.reason:
            return f"unchecked: {self.reason}"
        names = list(dict.fromkeys(row.name for row in self.joined if row.verdict == "unchecked"))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        zeros = f"; unchecked, zero or without a gradient in both runs: {', '.join(names[:8])}{more}"
        # A rank without rows of a value finds it equal, where the others find zeros in theirs: it is not compared.
        return (
            f"equal to the original ({counts(row for row in self.rows if row.name not in names)})"
            f"{zeros if names else ''}"
        )


HINTS = {
    "output": "FusedColwiseParallel where a weight has several sections (q, k, v; gate, up); local head counts"
    " (GQAParallel, or view(..., -1, head_size)) where heads are divided; ColwiseParallel(output_layouts=Replicate())"
    " for what needs all features",
    "gradient": "each rank has a partial sum of this gradient: NoParallel(sum_gradient=True) for its module (norms= of"
    " GQAParallel), or a style that shards it",
    "input-gradient": "the ranks' gradients of the input are not summed: each rank uses it on a shard. For an argument"
    " beside column-wise layers: BlockParallel(sum_gradient=(its name,)) for the module that takes it",
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
    difference: Row,
    place: str,
    *,
    styled: frozenset[str],
    has_cache: bool,
    adapter: str,
    hints: dict[str, str] | None,
) -> Problem:
    """Return the problem of a difference in a scope, with its remedy.

    Args:
        scope: Name of the scope.
        difference: The difference.
        place: First module with another output; `""` if not known.
        styled: Parameters that a style takes.
        has_cache: The call's inputs have a key-value cache.
        adapter: A low-rank adapter some of whose layers lack a style; `""` for none.
        hints: Remedies of the scope's own style by kind of difference, in place of `HINTS`; None for a style without.
    """
    name = (
        f"{scope} {difference.name}" if "output" in difference.name or "input" in difference.name else difference.name
    )
    code = {"shard-leaves": "shard-leaves", "raises": "check-raises"}.get(difference.kind, "check-mismatch")
    reason = difference.text("the original module's", " (run on full weights)")
    reason += f"; both part first at the output of {place}" if difference.kind == "output" and place else ""
    if difference.kind == "shard-leaves":
        reason = f"a shard leaves the model as a plain tensor: {difference.reason}"
    if difference.kind == "raises":
        name, reason = difference.name or name, f"{difference.reason}; the original, on full weights, runs"
    hint = (HINTS | (hints or {}))["cache" if difference.kind == "raises" and has_cache else difference.kind]
    if adapter and difference.kind in ("raises", "output"):
        hint = (
            f"layers of the adapter {adapter} have no style: LoRAParallel('column') or LoRAParallel('row') on it shards"
            " the base layer, A and B together"
        )
    if "mixed torch.Tensor and DTensor" in difference.reason:
        hint = (
            "one of both is a DTensor: PrepareModuleInput(use_local_output=True) for plain parameters; a style of"
            " your own that makes DTensors of parameters prepares the inputs too (distribute_module(input_fn=...))"
        )
    if difference.kind == "gradient" and difference.name in styled and hints is None:
        hint = "the forward uses this parameter other than its style expects: as a bare weight, or on other inputs"
    return Problem(code, name, found=f"in region {scope!r}: {reason}", hint=hint + '; check="never" skips the check')
