"""Bytes on each rank for parameters, buffers, gradients and optimizer state, exact to the byte."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.activations import ActivationEstimate
from shard_spec.estimate.roles import local_numels
from shard_spec.formatting import Table, human_ranks
from shard_spec.layout.layout import Layout
from shard_spec.plan.metadata import TensorMetadata, require_floating
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state of each parameter with a gradient.

    Attributes:
        name: Name in reports.
        slots: Number of tensors as large as the (local) parameter.
        scalar_bytes: Further bytes for each parameter: torch counts steps in a float32 scalar. It is on the CPU unless
            the optimizer is ``fused`` or ``capturable``, but counts all the same.
        dtype: Dtype of the slots; None means that of the parameter (or of its master copy).
        master: Dtype of a second, finer copy of each floating parameter, updated by the optimizer; None for none.
        step_slots: Number of tensors as large as the (local) parameter that ``step`` allocates and frees.
    """

    name: str
    slots: int = 0
    scalar_bytes: int = 0
    dtype: str | None = None
    master: str | None = None
    step_slots: int = 0


OptimizerLike: TypeAlias = "str | OptimizerState | None"

# From torch.optim 2.13: state tensors under the default arguments.
OPTIMIZERS = {
    "none": OptimizerState("none"),
    "sgd": OptimizerState("sgd"),
    "momentum": OptimizerState("momentum", slots=1),
    "adam": OptimizerState("adam", slots=2, scalar_bytes=4, step_slots=1),
    "adamw": OptimizerState("adamw", slots=2, scalar_bytes=4, step_slots=1),
    "amsgrad": OptimizerState("amsgrad", slots=3, scalar_bytes=4, step_slots=1),
    "adamax": OptimizerState("adamax", slots=2, scalar_bytes=4, step_slots=1),
    "adagrad": OptimizerState("adagrad", slots=1, scalar_bytes=4, step_slots=2),
    "rmsprop": OptimizerState("rmsprop", slots=1, scalar_bytes=4, step_slots=1),
    "adadelta": OptimizerState("adadelta", slots=2, scalar_bytes=4, step_slots=2),
}
for _name in ("sgd", "momentum", "adam", "adamw"):
    OPTIMIZERS[f"mixed-{_name}"] = replace(OPTIMIZERS[_name], name=f"mixed-{_name}", master="float32")


PARTS = ("parameters", "buffers", "gradients", "optimizer", "master")
STEP_PARTS = ("activations", "gathered", "logits and loss", "optimizer step")


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes per rank without the allocator's rounding; exact except for activations, logits and loss.

    Attributes:
        ranks: The ranks, ascending.
        parts: ``"parameters"``, ``"buffers"``, ``"gradients"``, ``"optimizer"``, ``"master"`` (copies) and, with a
            batch, ``"activations"``, ``"gathered"`` (layers along data axes), ``"logits and loss"`` and ``"optimizer
            step"`` at the peak of the step, to the bytes on each rank of ``ranks``.
        optimizer: The counted optimizer state.
        moment: Phase of the peak: ``"forward"``, ``"loss"``, ``"backward"`` or ``"optimizer"``; ``""`` without a batch.
        notes: Uncounted parts, a line each.
        uncounted: Modules with a Sharder: their sharding is unknown, so their parameters are not in the sums.
    """

    ranks: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    optimizer: OptimizerState
    uncounted: tuple[str, ...] = ()
    moment: str = ""
    notes: tuple[str, ...] = ()
    _resolution: Resolution | None = field(default=None, repr=False)
    _settings: Any = field(default=None, repr=False)
    _slots: tuple[tuple[int, int], ...] = field(default=((0, 0),), repr=False)  # by rank: bytes of one slot, of all and
    # of the largest parameter

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
        for tensor in self._resolution.metadata.tensors:
            layout = self._resolution.layouts.get(tensor.name)
            if layout is not None and layout.mesh.coordinate(rank) is not None:
                numel = prod(layout.local_shape(rank, tensor.shape))
                largest.append((tensor.name, sum(self._settings.bytes_of(tensor, numel).values())))
        return sorted(largest, key=lambda item: (-item[1], item[0]))[:count]

    def groups(self) -> list[tuple[list[int], dict[str, int]]]:
        """Group ranks of equal needs: their ranks and bytes by part; parts of zero bytes everywhere are left out."""
        groups: dict[tuple[int, ...], list[int]] = {}
        needed = {part: values for part, values in self.parts.items() if any(values)}
        for at, rank in enumerate(self.ranks):
            groups.setdefault(tuple(values[at] for values in needed.values()), []).append(rank)
        return [(ranks, dict(zip(needed, sizes, strict=True))) for sizes, ranks in groups.items()]

    def with_activations(self, estimate: ActivationEstimate, *, foreach: bool = True) -> Memory:
        """Return a copy with a step's peak beside the state added.

        Args:
            estimate: Of forward, loss and backward.
            foreach: True if the optimizer updates all parameters at once, torch's default on accelerators.
        """
        shares = estimate.gathered_bytes, estimate.loss_bytes
        peak, moment = (estimate.peak_bytes - sum(shares), *shares, 0), estimate.moment
        allocated = max((each[0] if foreach else 2 * each[1]) for each in self._slots) * self.optimizer.step_slots
        if allocated > estimate.peak_bytes:
            peak, moment = (0, 0, 0, allocated), "optimizer"
        # the fullest rank's figure on all of them
        sizes = {part: (size,) * len(self.ranks) for part, size in zip(STEP_PARTS, peak, strict=True)}
        return replace(self, parts={**self.parts, **sizes}, moment=moment, notes=estimate.notes)

    def verdict(self, limit: int) -> str:
        """Return one line: does every rank stay within ``limit`` bytes?"""
        of = f"{self.max_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        if max(self.max_bytes, limit) < 2**27:  # small models: a tenth of a GiB is too coarse
            of = f"{human_bytes(self.max_bytes)} of {human_bytes(limit)}"
        counted = "" if self.moment else " for parameters, gradients and optimizer state; activations are not counted"
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
            "optimizer": self.optimizer.name,
            "uncounted": list(self.uncounted),
            "moment": self.moment,
            "notes": list(self.notes),
        }
        return json.dumps(document, sort_keys=True, indent=1)

    def __str__(self) -> str:
        groups = self.groups()  # a line for each group of ranks of equal needs
        parts = list(groups[0][1]) if groups else []
        rows = [
            [human_ranks(ranks), *map(human_bytes, sizes.values()), human_bytes(sum(sizes.values()))]
            for ranks, sizes in groups
        ]
        if len(rows) > 16:
            rows[15:] = [[f"... {len(rows) - 15} more groups", *[""] * (len(parts) + 1)]]
        lines = [str(Table(["ranks", *parts, "total"], rows, range(1, len(parts) + 2)))]
        lines.append(f"optimizer: {self.optimizer.name}")
        if self.moment:
            lines.append(f"peak: {self.moment}; activations, logits and loss are an estimate")
        lines += [f"- {note}" for note in self.notes]
        if self.uncounted:
            lines.append(f"not counted (sharded by a Sharder): {', '.join(self.uncounted)}")
        return "\n".join(lines)

    def _at(self, rank: int) -> int:
        if rank not in self.ranks:
            raise PlanError(Problem("rank-outside-mesh", found=f"rank {rank}", hint="ask for a rank in memory.ranks"))
        return self.ranks.index(rank)


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the memory count beside parameters."""

    state: OptimizerState
    gradients: str | bool
    dtype: str | None

    def item_bytes(self, tensor: TensorMetadata) -> int:
        """Bytes of one element; ``dtype`` replaces that of floating tensors, as ``module.to(dtype)`` does."""
        return ITEM_BYTES[self.dtype] if self.dtype and tensor.is_floating else tensor.item_bytes

    def slot_bytes(self, tensor: TensorMetadata, numel: int) -> int:
        """Return the bytes of one slot of optimizer state."""
        dtype = self.state.dtype or self.state.master
        return numel * (ITEM_BYTES[dtype] if dtype else self.item_bytes(tensor))

    def bytes_of(self, tensor: TensorMetadata, numel: int) -> dict[str, int]:
        """Return the bytes by part for ``numel`` local elements of ``tensor``."""
        own = numel * self.item_bytes(tensor)
        if tensor.kind == "buffer":
            return {"buffers": own}  # no gradient, no state
        num_bytes = {"parameters": own}
        if tensor.requires_grad and tensor.is_floating and self.gradients is not False:
            gradient = self.item_bytes(tensor) if self.gradients is True else ITEM_BYTES[str(self.gradients)]
            num_bytes["gradients"] = numel * gradient
            state = self.state
            num_bytes["optimizer"] = self.slot_bytes(tensor, numel) * state.slots + state.scalar_bytes
            if state.master is not None:
                num_bytes["master"] = numel * ITEM_BYTES[state.master]
        return num_bytes


def memory_of(
    resolution: Resolution, *, optimizer: OptimizerLike = "adamw", grads: bool | str = True, dtype: str | None = None
) -> Memory:
    """Return the bytes per rank of a resolved plan."""
    require_floating(grads, dtype)
    state = optimizer if isinstance(optimizer, OptimizerState) else OPTIMIZERS.get(str(optimizer).lower())
    if state is None:
        hint = f"one of {', '.join(OPTIMIZERS)}, or OptimizerState(name, slots, scalar_bytes)"
        raise PlanError(Problem("invalid-argument", "optimizer", found=repr(optimizer)[:200], hint=hint))
    settings = MemorySettings(state, grads, dtype)
    ranks = resolution.ranks
    position = {rank: at for at, rank in enumerate(ranks)}
    sums = {part: [0] * len(ranks) for part in PARTS}
    slots = [(0, 0)] * len(ranks)
    # Tensors of one shape, layout and kind are counted together: nameless, so that they compare equal.
    groups: Counter[tuple[Layout, TensorMetadata]] = Counter()
    for t in resolution.metadata.tensors:
        if t.name in resolution.layouts:
            like = TensorMetadata("", t.shape, t.dtype, t.kind, t.requires_grad, ("",))
            groups[resolution.layouts[t.name], like] += 1
    for (layout, sample), count in groups.items():
        by_numel: dict[int, dict[str, int]] = {}  # most ranks share one local size
        for rank, numel in zip(layout.mesh.ranks, local_numels(layout, sample.shape), strict=True):
            if numel not in by_numel:
                by_numel[numel] = settings.bytes_of(sample, numel)
            at = position[rank]
            for part, size in by_numel[numel].items():
                sums[part][at] += size * count
            if "optimizer" in by_numel[numel]:
                slot = settings.slot_bytes(sample, numel)
                slots[at] = slots[at][0] + slot * count, max(slots[at][1], slot)
    parts = {part: tuple(values) for part, values in sums.items()}
    more: dict[str, Any] = {"_resolution": resolution, "_settings": settings, "_slots": tuple(slots)}
    return Memory(ranks, parts, settings.state, tuple(resolution.sharders), **more)
