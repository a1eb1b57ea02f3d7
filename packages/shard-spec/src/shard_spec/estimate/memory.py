"""Bytes on each rank for parameters, buffers, gradients and optimizer state, exact to the byte."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import nn

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.activations import ActivationEstimate
from shard_spec.estimate.optimizers import OptimizerChoice, OptimizerLike, OptimizerState, choose_optimizer
from shard_spec.estimate.roles import local_shapes
from shard_spec.formatting import Table, bytes_of, human_ranks
from shard_spec.layout.layout import Layout
from shard_spec.plan.metadata import TensorMetadata, require_floating
from shard_spec.plan.resolve import Resolution

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
    _steps: tuple[tuple[int, int], ...] = field(default=((0, 0),), repr=False)  # by rank: temporaries of a step over
    # all tensors at once, and over one after another

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
                local = layout.local_shape(rank, tensor.shape)
                state = self._settings.optimizer.of(tensor.name)
                largest.append((tensor.name, sum(self._settings.bytes_of(tensor, state, local).parts.values())))
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
            estimate: Of forward, loss and backward.
            foreach: True if the optimizer updates all parameters at once, torch's default on accelerators.
            buckets: True if DDP holds a copy of the gradients in its buckets, from the first step on.
        """
        shares = estimate.gathered_bytes, estimate.loss_bytes
        peak, moment, to_come = (estimate.peak_bytes - sum(shares), *shares, 0), estimate.moment, estimate.to_come
        allocated = max(each[0] if foreach else each[1] for each in self._steps)
        if allocated > estimate.peak_bytes - to_come * max(self.parts["gradients"], default=0):
            peak, moment, to_come = (0, 0, 0, allocated), "optimizer", 0.0
        # the fullest rank's figure on all of them
        sizes = {part: (size,) * len(self.ranks) for part, size in zip(STEP_PARTS[:4], peak, strict=True)}
        sizes["gradients to come"] = tuple(-round(to_come * size) for size in self.parts["gradients"])
        sizes["DDP buckets"] = tuple(size * buckets for size in self.parts["gradients"])
        # Sparse gradients are among the activations of a step.
        kept = tuple(note for note in self.notes if "sparse tables" not in note)
        more: dict[str, Any] = {"notes": (*kept, *estimate.notes), "assumptions": estimate.assumptions}
        return replace(self, parts={**self.parts, **sizes}, moment=moment, **more)

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
            [human_ranks(ranks), human_bytes(sum(sizes.values())), *map(human_bytes, sizes.values())]
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


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the memory count beside parameters."""

    optimizer: OptimizerChoice
    gradients: str | bool
    dtype: str | None

    def dtype_of(self, tensor: TensorMetadata) -> str:
        """Return the dtype in training: ``dtype`` replaces that of floating tensors, as ``module.to(dtype)`` does."""
        return self.dtype if self.dtype and tensor.is_floating else tensor.dtype

    def bytes_of(self, tensor: TensorMetadata, state: OptimizerState, local: tuple[int, ...]) -> LocalBytes:
        """Return the bytes for a shard of shape ``local`` of ``tensor``."""
        dtype, numel = self.dtype_of(tensor), prod(local)
        own = tensor.bytes_of(numel, self.dtype)
        if tensor.kind == "buffer":
            return LocalBytes({"buffers": own})  # no gradient, no state
        num_bytes = {"parameters": own}
        if not (tensor.requires_grad and tensor.is_floating and self.gradients is not False):
            return LocalBytes(num_bytes)
        cost = state.cost(local, tensor.shape, dtype)
        gradient = dtype if self.gradients is True else str(self.gradients)
        num_bytes["gradients"] = 0 if tensor.sparse_grad else numel * ITEM_BYTES[gradient]
        num_bytes["optimizer"] = cost.state
        if state.master is not None:
            num_bytes["master"] = numel * ITEM_BYTES[state.master]
        return LocalBytes(num_bytes, cost.step, cost.loop)


@dataclass(frozen=True)
class LocalBytes:
    """Bytes of one shard: by part, and of temporaries in the optimizer's step (see `OptimizerCost`)."""

    parts: dict[str, int]
    step: int = 0
    loop: int = 0


def memory_of(
    resolution: Resolution,
    *,
    optimizer: OptimizerLike = "adamw",
    grads: bool | str = True,
    dtype: str | None = None,
    module: nn.Module | None = None,
) -> Memory:
    """Return the bytes per rank of a resolved plan; ``module`` is needed for an optimizer's instance."""
    require_floating(grads, dtype)
    choice = choose_optimizer(optimizer, resolution.metadata, module)
    settings = MemorySettings(choice, grads, dtype)
    ranks = resolution.ranks
    position = {rank: at for at, rank in enumerate(ranks)}
    sums = {part: [0] * len(ranks) for part in PARTS}
    steps = [(0, 0)] * len(ranks)
    # Tensors of one shape, layout and kind are counted together: nameless, so that they compare equal.
    groups: Counter[tuple[Layout, TensorMetadata, OptimizerState]] = Counter()
    for t in resolution.metadata.tensors:
        if t.name in resolution.layouts:
            like = replace(t, name="", aliases=("",), module_type="")
            groups[resolution.layouts[t.name], like, choice.of(t.name)] += 1
    for (layout, sample, state), count in groups.items():
        by_shape: dict[tuple[int, ...], LocalBytes] = {}  # most ranks share one local shape
        for rank, local in zip(layout.mesh.ranks, local_shapes(layout, sample.shape), strict=True):
            if local not in by_shape:
                by_shape[local] = settings.bytes_of(sample, state, local)
            at, sizes = position[rank], by_shape[local]
            for part, size in sizes.parts.items():
                sums[part][at] += size * count
            steps[at] = steps[at][0] + sizes.step * count, max(steps[at][1], sizes.loop)
    parts = {part: tuple(values) for part, values in sums.items()}
    more: dict[str, Any] = {"_resolution": resolution, "_settings": settings, "_steps": tuple(steps)}
    packed = [tensor for tensor in resolution.metadata.parameters if tensor.stored_bytes is not None]
    lines = []
    if packed:
        bits = 8 * sum(each.bytes_of(each.numel) for each in packed) / sum(each.numel for each in packed)
        lines.append(f"{len(packed)} quantised weights count as stored, {bits:.2f} bits an element, and frozen")
    sparse = [tensor.name for tensor in resolution.metadata.parameters if tensor.sparse_grad and grads is not False]
    if sparse:
        line = f"not counted: gradients of sparse tables ({', '.join(sparse[:3])}{', ...' if len(sparse) > 3 else ''})"
        lines.append(f"{line}: they are as large as the rows that a batch looks up")
    more["notes"] = tuple(lines)
    return Memory(ranks, parts, choice.name, tuple(resolution.sharders), **more)
