"""Bytes on each rank for parameters, buffers, gradients and optimizer state, exact to the byte."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import nn

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.activations import ActivationEstimate
from shard_spec.estimate.exchanges import Stages, stages_of
from shard_spec.estimate.optimizers import (
    OPTIMIZERS,
    OptimizerChoice,
    OptimizerLike,
    OptimizerState,
    Owned,
    OwnedTensor,
    choose_optimizer,
    owned_by_ranks,
    redundancy_free,
)
from shard_spec.estimate.step_options import StepOptions, check_options, unit_transfers
from shard_spec.formatting import Table, bytes_of, human_ranks
from shard_spec.layout import Layout, MeshSpec
from shard_spec.plan.resolve import ModelMetadata, Resolution, TensorMetadata, require_floating

PARTS = ("parameters", "buffers", "gradients", "optimizer", "master")
STEP_PARTS = ("activations", "gathered", "logits and loss", "optimizer step", "gradients to come", "DDP buckets")


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes per rank without the allocator's rounding; exact except for activations, logits and loss.

    Attributes:
        ranks: The ranks, ascending.
        parts: ``"parameters"``, ``"buffers"``, ``"gradients"``, ``"optimizer"``, ``"master"`` (copies) and, with a
            batch, ``"activations"``, ``"gathered"`` (layers along data axes), ``"logits and loss"``, ``"optimizer
            step"``, ``"gradients to come"`` (negative: not made yet) and ``"DDP buckets"`` at the peak of the step, to
            the bytes on each rank of ``ranks``.
        optimizer: Name of the counted optimizer.
        moment: Phase of the peak: ``"forward"``, ``"loss"``, ``"backward"`` or ``"optimizer"``; ``""`` without a batch.
        notes: Uncounted parts, a line each.
        assumptions: Roles of axes that follow from their names alone, a line each.
        uncounted: Modules with a Sharder: their sharding is unknown, so their parameters are not in the sums.
    """

    ranks: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    optimizer: str
    uncounted: tuple[str, ...] = ()
    moment: str = ""
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    _resolution: Resolution | None = field(default=None, repr=False)
    _settings: Any = field(default=None, repr=False)
    _step_bytes: Callable[[int, bool], int] = field(default=lambda rank, foreach: 0, repr=False)

    @property
    def totals(self) -> tuple[int, ...]:
        """Total bytes on each rank of ``ranks``."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    def total(self, rank: int) -> int:
        """Return the bytes on ``rank``."""
        return self.totals[self._at(rank)]

    def on(self, rank: int) -> dict[str, int]:
        """Return the bytes on ``rank`` by part."""
        at = self._at(rank)
        return {part: values[at] for part, values in self.parts.items()}

    @property
    def max_bytes(self) -> int:
        """Most bytes on a rank."""
        return max(self.totals, default=0)

    @property
    def worst_rank(self) -> int:
        """The fullest rank; the lowest if there are several."""
        totals = self.totals
        return self.ranks[totals.index(max(totals))] if totals else 0

    def largest(self, rank: int, count: int = 10) -> list[tuple[str, int]]:
        """Return the ``count`` tensors with most bytes on ``rank``, their gradients and state included."""
        assert self._resolution is not None
        largest = []
        for tensor, layout in self._resolution.placed():
            if layout.mesh.coordinate(rank) is not None:
                local = layout.local_shape(rank, tensor.shape)
                state = self._settings.optimizer.of(tensor.name)
                largest.append((tensor.name, sum(self._settings.bytes_of(tensor, state, local).values())))
        return sorted(largest, key=lambda item: (-item[1], item[0]))[:count]

    def groups(self) -> list[tuple[list[int], dict[str, int]]]:
        """Group ranks of equal needs: their ranks and bytes by part; parts of zero bytes everywhere are left out."""
        groups: dict[tuple[int, ...], list[int]] = {}
        needed = {part: values for part, values in self.parts.items() if any(values)}
        for at, rank in enumerate(self.ranks):
            groups.setdefault(tuple(values[at] for values in needed.values()), []).append(rank)
        return [(ranks, dict(zip(needed, sizes, strict=True))) for sizes, ranks in groups.items()]

    def with_activations(self, estimate: ActivationEstimate, *, foreach: bool = True, buckets: bool = False) -> Memory:
        """Return a copy with a step's peak beside the state added.

        Args:
            estimate: Of forward, loss and backward; with pipeline stages one for each.
            foreach: True if the optimizer updates all parameters at once, torch's default on accelerators.
            buckets: True if DDP holds a copy of the gradients in its buckets, from the first step on.
        """
        by_stage, totals = estimate.by_stage or (estimate,), self.totals
        stage_of = [0] * len(self.ranks)
        if estimate.stage_axis and self._resolution is not None:
            mesh = self._resolution.one_mesh
            coordinates = [mesh.coordinate(rank) or () for rank in self.ranks]
            stage_of = [each[mesh.axis_index(estimate.stage_axis)] for each in coordinates]
        sizes = {part: [0] * len(self.ranks) for part in STEP_PARTS}
        fullest: list[tuple[int, str]] = []  # bytes and moment of each stage
        assumed: set[str] = set()
        for stage, each in enumerate(by_stage):
            own = [at for at, of in enumerate(stage_of) if of == stage]
            shares, gradients = (each.gathered_bytes, each.loss_bytes), [self.parts["gradients"][at] for at in own]
            peak, moment, to_come = (each.peak_bytes - sum(shares), *shares, 0), each.moment, each.to_come
            allocated = self._allocated_by_steps(own, foreach)
            if allocated > each.peak_bytes - to_come * max(gradients, default=0):
                peak, moment, to_come = (0, 0, 0, allocated), "optimizer", 0.0
                if 100 * each.output_bytes > max(totals):
                    output = human_bytes(each.output_bytes)
                    assumed.add(f"the optimizer's step begins when outputs of forward ({output}) are freed")
            for at, gradient in zip(own, gradients, strict=True):  # the fullest rank's figure on all of the stage
                more = (-round(to_come * gradient), gradient * buckets)
                for part, size in zip(STEP_PARTS, (*peak, *more), strict=True):
                    sizes[part][at] = size
                fullest.append((totals[at] + sum(peak) + sum(more), moment))
        return replace(
            self,
            parts={**self.parts, **{part: tuple(values) for part, values in sizes.items()}},
            moment=max(fullest, key=lambda each: each[0], default=(0, estimate.moment))[1],
            # Sparse gradients are among the activations of a step.
            notes=(*(note for note in self.notes if "sparse tables" not in note), *estimate.notes),
            assumptions=(*estimate.assumptions, *sorted(assumed)),
        )

    def _allocated_by_steps(self, places: list[int], foreach: bool) -> int:
        """Return the most bytes that optimizers allocate in their steps on a rank at one of ``places``."""
        by_state = sorted(places, key=lambda at: -self.parts["gradients"][at] - self.parts["optimizer"][at])
        # The rank with most state, and the first one: the owner of the largest parameter where ranks share it out.
        steps = (self._step_bytes(self.ranks[at], foreach) for at in {*by_state[:1], *places[:1]})
        return max(steps, default=0)

    def verdict(self, limit: int | str) -> str:
        """Return one line: does every rank stay within ``limit``? It ends with what was assumed.

        Args:
            limit: Bytes, or text with a unit such as ``"80GiB"`` or ``"80GB"``.

        Raises:
            PlanError: ``invalid-argument`` for a limit of another form.
        """
        limit = bytes_of(limit, "limit")
        of = f"{self.max_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        if max(self.max_bytes, limit) < 2**27:  # small models: a tenth of a GiB is too coarse
            of = f"{human_bytes(self.max_bytes)} of {human_bytes(limit)}"
        counted = "" if self.moment else " for parameters, gradients and optimizer state; activations are not counted"
        counted += "".join(f"; {line}" for line in self.assumptions)
        if self.max_bytes <= limit:
            return f"fits: {of} on each of {len(self.ranks)} ranks{counted}"
        where = f"peak at the {self.moment}" if self.moment else f"rank {self.worst_rank}"
        return f"does not fit: {of}, {where}{counted}"

    def to_json(self) -> str:
        """Return the numbers as JSON."""
        document: dict[str, Any] = {
            "format": "shard-spec/memory",
            "version": 1,
            "ranks": list(self.ranks),
            "parts": {part: list(values) for part, values in self.parts.items()},
            "total": list(self.totals),
            "optimizer": self.optimizer,
            "uncounted": list(self.uncounted),
            "moment": self.moment,
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
        }
        return json.dumps(document, sort_keys=True, indent=1)

    def __str__(self) -> str:
        groups = self.groups()  # a line for each group of ranks of equal needs
        parts = list(groups[0][1]) if groups else []
        rows = [
            [_shortened(human_ranks(ranks)), human_bytes(sum(sizes.values())), *map(human_bytes, sizes.values())]
            for ranks, sizes in groups
        ]
        if len(rows) > 16:
            rows[15:] = [[f"... {len(rows) - 15} more groups", *[""] * (len(parts) + 1)]]
        # The total stands before its parts: on a page of 98 columns the last ones may be out of view.
        lines = [str(Table(["ranks", "total", *parts], rows, range(1, len(parts) + 2)))]
        lines.append(f"optimizer: {self.optimizer}")
        if self.moment:
            lines.append(f"peak: {self.moment}; activations, logits and loss are an estimate")
        lines += [f"- {note}" for note in (*self.notes, *self.assumptions)]
        if self.uncounted:
            lines.append(f"not counted (sharded by a Sharder): {', '.join(self.uncounted)}")
        return "\n".join(lines)

    def _at(self, rank: int) -> int:
        if rank not in self.ranks:
            raise PlanError(Problem("rank-outside-mesh", found=f"rank {rank}", hint="ask for a rank in memory.ranks"))
        return self.ranks.index(rank)


def _shortened(ranks: str) -> str:
    return ranks if len(ranks) < 28 else f"{ranks[:26]}…"


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the memory count beside parameters."""

    optimizer: OptimizerChoice
    gradients: str | bool
    dtype: str | None

    def dtype_of(self, tensor: TensorMetadata) -> str:
        """Return the dtype in training: ``dtype`` replaces that of floating tensors, as ``module.to(dtype)`` does."""
        return self.dtype if self.dtype and tensor.is_floating else tensor.dtype

    def bytes_of(self, tensor: TensorMetadata, state: OptimizerState, local: tuple[int, ...]) -> dict[str, int]:
        """Return the bytes for a shard of shape ``local`` of ``tensor`` by part."""
        dtype, numel = self.dtype_of(tensor), prod(local)
        own = tensor.bytes_of(numel, self.dtype)
        num_bytes = {f"{tensor.kind}s": own}
        if not tensor.trains or self.gradients is False:
            return num_bytes  # no gradient, no state
        if state.on_owners:  # on the matrices' owners
            state = OPTIMIZERS["none"]
        gradient = dtype if self.gradients is True else str(self.gradients)
        num_bytes["gradients"] = 0 if tensor.sparse_grad else numel * ITEM_BYTES[gradient]
        num_bytes["optimizer"] = state.state_bytes(local, tensor.shape, dtype)
        if state.master is not None:
            num_bytes["master"] = numel * ITEM_BYTES[state.master]
        return num_bytes


def memory_of(
    resolution: Resolution,
    options: StepOptions | None = None,
    *,
    optimizer: OptimizerLike = "adamw",
    grads: bool | str = True,
    module: nn.Module | ModelMetadata | None = None,
) -> Memory:
    """Return the bytes per rank of a resolved plan; ``module`` is needed for an optimizer's instance."""
    options = options or {}
    check_options(options)
    dtype = options.get("dtype")
    if not isinstance(grads, bool | str):
        raise PlanError(Problem("invalid-argument", "grads", found=repr(grads), hint="True, False, or a dtype"))
    require_floating(None if isinstance(grads, bool) else grads)
    choice = choose_optimizer(optimizer, resolution.metadata, module)
    settings = MemorySettings(choice, grads, dtype)
    owned, stages = owned_matrices(resolution, settings), stages_of(resolution)
    zero, owner_of, index_of = _sharded_state(resolution, options)
    ranks = resolution.ranks
    position = {rank: at for at, rank in enumerate(ranks)}
    sums = {part: [0] * len(ranks) for part in PARTS}
    # Tensors of one shape, layout and kind are counted together: nameless, so that they compare equal.
    groups: Counter[tuple[Layout, TensorMetadata, OptimizerState, int]] = Counter()
    for t, layout in resolution.placed():
        like = replace(t, name="", aliases=("",), module_type="")
        for each in (layout,) if stages is None else stages.layouts(t, layout):
            groups[each, like, choice.of(t.name), owner_of.get(t.name, -1)] += 1
    for (layout, sample, state, owner), count in groups.items():
        staged = bool(layout.stages)
        by_shape: dict[tuple[tuple[int, ...], bool], dict[str, int]] = {}  # most ranks share one local shape
        for rank, local in zip(layout.mesh.ranks, layout.local_shapes(sample.shape), strict=True):
            if staged and not layout.is_present(rank):
                continue
            owns = owner < 0 or index_of[rank] == owner
            if (local, owns) not in by_shape:
                by_shape[local, owns] = settings.bytes_of(sample, state if owns else OPTIMIZERS["none"], local)
            for part, size in by_shape[local, owns].items():
                sums[part][position[rank]] += size * count
    if owned is not None:
        sums["master"] = [sum(pair) for pair in zip(sums["master"], owned.masters, strict=True)]
        sums["optimizer"] = [sum(pair) for pair in zip(sums["optimizer"], owned.state, strict=True)]
    return Memory(
        ranks,
        {part: tuple(values) for part, values in sums.items()},
        choice.name,
        tuple(resolution.sharders),
        notes=_notes(resolution, owned, stages, settings, zero),
        _resolution=resolution,
        _settings=settings,
        _step_bytes=functools.partial(_step_bytes, resolution, settings, stages, owned, (owner_of, index_of)),
    )


def _step_bytes(
    resolution: Resolution,
    settings: MemorySettings,
    stages: Stages | None,
    owned: Owned | None,
    owners: tuple[Mapping[str, int], Mapping[int, int]],
    rank: int,
    foreach: bool,
) -> int:
    """Return the most bytes that optimizers allocate on ``rank`` in their steps, one after another."""
    owner_of, index_of = owners
    by_state: dict[OptimizerState, list[tuple[tuple[int, ...], str]]] = {}
    for tensor, layout in resolution.placed():
        state = settings.optimizer.of(tensor.name)
        owns = tensor.name not in owner_of or owner_of[tensor.name] == index_of[rank]
        if not (tensor.trains and owns) or state.on_owners:
            continue
        for each in (layout,) if stages is None else stages.layouts(tensor, layout):
            if not each.stages or each.is_present(rank):
                local = each.local_shape(rank, tensor.shape), settings.dtype_of(tensor)
                by_state.setdefault(state, []).append(local)
    steps = (state.step_bytes(tuple(tensors), foreach=foreach) for state, tensors in by_state.items())
    return max(steps, default=0) + (owned.step[resolution.ranks.index(rank)] if owned is not None else 0)


def owned_matrices(resolution: Resolution, settings: MemorySettings) -> Owned | None:
    """Return the bytes of matrices on owner ranks; None if no parameter has an optimizer of full matrices."""
    tensors = [
        OwnedTensor(tensor, layout, state, settings.dtype_of(tensor))
        for tensor, layout in resolution.placed()
        if (state := settings.optimizer.of(tensor.name)).on_owners and tensor.trains
    ]
    return owned_by_ranks(tensors, resolution.ranks) if tensors else None


def _sharded_state(
    resolution: Resolution, options: StepOptions
) -> tuple[tuple[str, ...], dict[str, int], dict[int, int]]:
    """Return the axes that share out optimizer state, each parameter's owner, and each rank's number among these."""
    if not options.get("zero"):
        return (), {}, {}
    roles, mesh = resolution.axis_roles(options.get("data_axes")), resolution.one_mesh
    unit_transfers(resolution, roles, options)  # checks the options
    axes = tuple(axis for axis in roles.data if mesh.axis_size(axis) > 1)
    places = [mesh.axis_index(axis) for axis in axes]
    shares = MeshSpec({axis: mesh.axis_size(axis) for axis in axes})  # a number for each coordinate along them
    coordinates = {rank: mesh.coordinate(rank) or () for rank in mesh.ranks}
    index_of = {rank: shares.rank_at([at[place] for place in places]) for rank, at in coordinates.items()}
    sizes = {
        each.name: prod(layout.local_shape(layout.first_rank, each.shape))
        for each, layout in resolution.placed()
        if each.trains
    }
    return axes, redundancy_free(sizes, shares.world_size), index_of


def _notes(
    resolution: Resolution, owned: Owned | None, stages: Stages | None, settings: MemorySettings, zero: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what a reader of the bytes has to know, a line each."""
    lines = list(() if owned is None else owned.notes)
    if zero:
        lines.append(
            f"optimizer state lies on one rank along {', '.join(zero)}, as ZeroRedundancyOptimizer shares out one group"
            " of all trained parameters; of several groups it shares out one after another"
        )
    for tensor, layout in resolution.placed() if stages is not None else ():
        if stages is not None and tensor.kind == "parameter" and (copies := stages.copies(tensor, layout)):
            also = ", ".join(map(str, copies))
            lines.append(f"tied: {' = '.join(tensor.aliases)} has a copy, with gradient and state, on stage {also} too")
    packed = [tensor for tensor in resolution.metadata.parameters if tensor.stored_bytes is not None]
    if packed:
        bits = 8 * sum(each.bytes_of(each.numel) for each in packed) / sum(each.numel for each in packed)
        lines.append(f"{len(packed)} quantised weights count as stored, {bits:.2f} bits an element, and frozen")
    sparse = [
        tensor.name
        for tensor in resolution.metadata.parameters
        if tensor.sparse_grad and settings.gradients is not False
    ]
    if sparse:
        line = f"not counted: gradients of sparse tables ({', '.join(sparse[:3])}{', ...' if len(sparse) > 3 else ''})"
        lines.append(f"{line}: they are as large as the rows that a batch looks up")
        if any(settings.optimizer.of(name).slots for name in sparse):
            lines.append(
                "not counted: what optimizers of sparse gradients allocate in their step; this is a lower bound"
            )
    return tuple(lines)
