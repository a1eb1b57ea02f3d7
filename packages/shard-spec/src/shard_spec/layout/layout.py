"""Layout: the boxes of a global tensor on the ranks of a mesh.

A box is a rectangle of the global tensor; intervals ``(offset, size)`` of one dim compose in local order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product, repeat
from math import prod
from typing import TYPE_CHECKING

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.mesh import MeshSpec, unknown_axis
from shard_spec.layout.placements import (
    REPLICATE,
    CuttingPlacement,
    Interval,
    PartialSpec,
    PlacementLike,
    PlacementSpec,
    ReplicateSpec,
    ShardSpec,
    SpecialShard,
    StageShard,
    UnevenShard,
    parse_layout,
    parse_placement,
    placement_spec,
    to_placement,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def compose(outer: list[Interval], inner: list[Interval]) -> list[Interval]:
    """Compose intervals: ``inner`` counts along the concatenation of ``outer``, the result along the dim."""
    if len(outer) == 1:
        start = outer[0][0]
        return [(start + offset, size) for offset, size in inner]
    # One pass over both lists, which ascend along the local tensor: untrusted plans must not take quadratic time.
    result: list[Interval] = []
    remaining = iter(inner)
    offset, size = next(remaining, (0, 0))
    position = 0
    for start, length in outer:
        while size and offset < position + length:
            taken = min(size, position + length - offset)
            result.append((start + offset - position, taken))
            offset, size = (offset + taken, size - taken) if taken < size else next(remaining, (0, 0))
        position += length
    return result


def merge(found: list[Interval]) -> list[Interval]:
    """Join intervals that are adjacent both along the dim and in the local tensor."""
    merged: list[Interval] = []
    for offset, size in found:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged


@dataclass(frozen=True)
class Box:
    """A rectangular shard of a global tensor, as offsets and sizes.

    Attributes:
        offsets: First index in each dim of the global tensor.
        sizes: Number of indices in each dim; 0 makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        # tuple() also turns torch.Size and lists into plain tuples, so that equal boxes compare equal.
        vars(self).update(
            offsets=tuple(int(offset) for offset in self.offsets),
            sizes=tuple(int(size) for size in self.sizes),
        )
        problems = []
        if len(self.offsets) != len(self.sizes):
            problems.append(
                Problem(
                    "shape-mismatch",
                    found=f"{len(self.offsets)} offsets and {len(self.sizes)} sizes",
                    hint="give one offset and one size for each dim",
                )
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            problems.append(Problem("box-out-of-range", found=f"{self!r}", hint="offsets and sizes are at least 0"))
        raise_problems(problems)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the index of this box in the global tensor: ``tensor[box.slices()]``."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if they share no element."""
        if self.ndim != other.ndim:
            raise PlanError(
                Problem(
                    "shape-mismatch",
                    found=f"boxes of {self.ndim} and {other.ndim} dims",
                    hint="intersect boxes of the same global tensor",
                )
            )
        offsets, sizes = [], []
        for offset, size, other_offset, other_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            start = max(offset, other_offset)
            length = min(offset + size, other_offset + other_size) - start
            if length <= 0:  # disjoint in one dim
                return None
            offsets.append(start)
            sizes.append(length)
        return _box(tuple(offsets), tuple(sizes))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Build a box from valid values, without the checks, which cost more than the box."""
    box = object.__new__(Box)
    vars(box).update(
        offsets=offsets,
        sizes=sizes,
    )
    return box


def grid(intervals: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """Return the boxes of a grid, row-major: one for each combination of each dim's intervals, without empty ones."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for along in intervals:
        if len(along) == 1:  # the usual case, without a product
            offset, size = along[0]
            if size == 0:
                return ()
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes]
        else:
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes for offset, size in along if size]
    return tuple(_box(offsets, sizes) for offsets, sizes in boxes)


# One sharding axis of one dim: (position of the axis on the mesh, size of the axis, spec).
Cut = tuple[int, int, CuttingPlacement]


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Layout of one tensor on the ranks of a mesh: one placement for each axis.

    Args:
        mesh: The axes and ranks.
        placements: One placement for each axis in order; or a mapping from axis name to placement, other axes
            replicate; or the text of a layout, ``"dp:S(0), tp:R"``. Placements are torch's ``Replicate()``,
            ``Shard(dim)``, ``Partial(op)``, this package's ``UnevenShard``, ``BlockShard``, ``InterleavedShard``, or
            the text of one.
        order: Shard order of axes that shard one dim, by name. Unnamed axes follow in mesh order. Default: mesh order,
            as in a DTensor.

    Raises:
        PlanError: With every problem that shows without the tensor's shape.
    """

    mesh: MeshSpec
    specs: tuple[PlacementSpec, ...]
    order: tuple[str, ...]
    _hash: int = field(compare=False)  # computed once: layouts are keys of many tables

    def __init__(
        self,
        mesh: MeshSpec,
        placements: Sequence[PlacementLike] | Mapping[str, PlacementLike] | str,
        order: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(mesh, MeshSpec):
            hint = "the order is Layout(mesh, placements), with a MeshSpec"  # type: ignore[unreachable]  # callers are untyped
            raise PlanError(Problem("wrong-type", "mesh", found=f"{mesh!r:.100}", hint=hint))
        text_order: tuple[str, ...] = ()
        if isinstance(placements, str):
            by_axis, text_order = parse_layout(placements, mesh.axis_names)
        else:
            by_axis = _specs_by_axis(mesh, placements)
        order = text_order if order is None else tuple(order)
        specs = tuple(by_axis.get(axis, REPLICATE) for axis in mesh.axis_names)
        raise_problems(_axis_problems(mesh, by_axis, specs, order))
        # With every sharding axis, or () for mesh order: equal layouts compare equal.
        # A stage has all or nothing of a dim, so no order matters for its axis.
        named = zip(mesh.axis_names, specs, strict=True)
        own = tuple(axis for axis, spec in named if spec.dim is not None and not isinstance(spec, StageShard))
        order = tuple(axis for axis in order if axis in own)
        full = order + tuple(axis for axis in own if axis not in order)
        order = () if not order or full == own else full
        vars(self).update(
            mesh=mesh,
            specs=specs,
            order=order,
            _hash=hash((mesh, specs, order)),
        )

    def __repr__(self) -> str:
        return f"Layout({self.mesh!r}, {str(self)!r})"

    def __str__(self) -> str:
        named = list(zip(self.mesh.axis_names, self.specs, strict=True))
        text = ", ".join(f"{name}:{spec}" for name, spec in named if not isinstance(spec, StageShard))
        stages = ", ".join(f"{name}:{spec.stage}" for name, spec in named if isinstance(spec, StageShard))
        text = f"{text} @ {stages}".strip() if stages else text
        return text + (f"; order={'>'.join(self.order)}" if self.order else "")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.mesh, self.specs, self.order)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def parse(cls, text: str, mesh: MeshSpec) -> Layout:
        """Parse the text form; ``Layout.parse(str(layout), layout.mesh) == layout``."""
        return cls(mesh, text)

    @classmethod
    def replicated(cls, mesh: MeshSpec) -> Layout:
        """Return the layout with the full tensor on every rank."""
        return cls(mesh, {})

    # ---- properties -------------------------------------------------------------------------------------------

    @cached_property
    def placements(self) -> tuple[Placement | SpecialShard, ...]:
        """One placement object for each axis; imports ``torch.distributed.tensor`` for torch's own."""
        return tuple(to_placement(spec) for spec in self.specs)

    @property
    def partial(self) -> dict[str, str]:
        """Axes of unreduced values, with the reduce op of each."""
        named = zip(self.mesh.axis_names, self.specs, strict=True)
        return {axis: spec.op for axis, spec in named if isinstance(spec, PartialSpec)}

    @property
    def sharded_axes(self) -> dict[str, int]:
        """Sharding axes with their dims as written, perhaps negative."""
        named = zip(self.mesh.axis_names, self.specs, strict=True)
        return {axis: spec.dim for axis, spec in named if spec.dim is not None}

    @property
    def stages(self) -> dict[str, int]:
        """Axes of pipeline stages, with the stage that holds the tensor."""
        named = zip(self.mesh.axis_names, self.specs, strict=True)
        return {axis: spec.stage for axis, spec in named if isinstance(spec, StageShard)}

    @cached_property
    def first_rank(self) -> int:
        """The rank at the first coordinate of each axis, of those that hold the tensor's stage."""
        return self.mesh.rank_at([getattr(spec, "stage", 0) for spec in self.specs])

    def is_present(self, rank: int) -> bool:
        """Return True if the tensor is of the stage of ``rank``; its part of it may be empty all the same."""
        return all(
            getattr(spec, "stage", at) == at for at, spec in zip(self._coordinate(rank), self.specs, strict=True)
        )

    @property
    def is_replicated(self) -> bool:
        """True if every rank of the mesh holds the full tensor."""
        return all(isinstance(spec, ReplicateSpec) for spec in self.specs)

    # ---- shards of ranks --------------------------------------------------------------------------------------

    def problems(self, shape: Sequence[int], name: str = "") -> tuple[Problem, ...]:
        """Return the problems of this layout for a tensor of ``shape`` called ``name``. Empty if it is valid."""
        shape = tuple(shape)
        problems = [
            Problem(
                "dim-out-of-range",
                name,
                spec.dim,
                axis,
                f"a tensor of shape {shape} has {len(shape)} dims",
                f"dims from {-len(shape)} to {len(shape) - 1}" if shape else "a scalar can only be replicated",
            )
            for axis, spec in zip(self.mesh.axis_names, self.specs, strict=True)
            if spec.dim is not None and not -len(shape) <= spec.dim < len(shape)
        ]
        # The sizes of sections and of uneven shards, once the dims are valid.
        for dim, cuts in () if problems else cuts_by_dim(self, len(shape)):
            lengths = {shape[dim]}
            for place, (at, count, cut) in enumerate(cuts, 1):
                if wrong := next((why for why in map(cut.misfit, sorted(lengths)) if why), ""):
                    code = "shape-mismatch" if isinstance(cut, UnevenShard) else "invalid-sections"
                    axis, hint = self.mesh.axis_names[at], f"shape is {shape}; correct the sizes"
                    problems.append(Problem(code, name, dim, axis, wrong, hint))
                    break
                if place < len(cuts):  # the next axis shards what this one leaves
                    lengths = set().union(*(cut.lengths(length, count) for length in lengths))
        return tuple(problems)

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the local tensor on ``rank`` for a global tensor of ``shape``.

        Raises:
            PlanError: When the layout does not match the shape, or ``rank`` is not on the mesh.
        """
        return tuple(sum(size for _, size in along) for along in self.intervals(rank, shape))

    def local_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the local shapes of all ranks, in mesh order.

        A dim's length depends only on the coordinates on the axes that shard it, so it is computed once for each of
        these: 128 + 8 lengths for ``dp:S(0), tp:S(1)`` on 1,024 ranks.

        Raises:
            PlanError: When the layout does not match the shape.
        """
        shape, coordinates = tuple(shape), list(product(*map(range, self.mesh.shape)))
        lengths: list[Iterable[int]] = [repeat(size, len(coordinates)) for size in shape]
        for dim, cuts in _recipe(self, shape):
            by_place: dict[tuple[int, ...], int] = {(): shape[dim]}  # coordinates on the axes so far to a length
            for _, count, spec in cuts:  # each axis divides what the axes before it have left
                parts = {length: spec.parts(length, count) for length in {*by_place.values()}}
                by_place = {
                    (*place, at): part for place, left in by_place.items() for at, part in enumerate(parts[left])
                }
            axes = [at for at, _, _ in cuts]
            lengths[dim] = [by_place[tuple([coordinate[at] for at in axes])] for coordinate in coordinates]
        return list(zip(*lengths, strict=True)) if shape else [()] * len(coordinates)

    def offsets(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the offsets of the local tensor of ``rank``. An empty dim begins at its end, as in DTensor.

        Raises:
            PlanError: As :meth:`local_shape`, and ``not-a-grid`` if the local tensor is not one box.
        """
        intervals = self.intervals(rank, shape)
        for dim, along in enumerate(intervals):
            if len(along) > 1:
                raise PlanError(
                    Problem(
                        "not-a-grid",
                        dim=dim,
                        found=f"rank {rank} holds {len(along)} separate intervals",
                        hint="ask boxes(rank, shape)",
                    )
                )
        return tuple(along[0][0] for along in intervals)

    def intervals(self, rank: int, shape: Sequence[int]) -> tuple[tuple[Interval, ...], ...]:
        """Return each dim's ``(offset, size)`` intervals on ``rank``, in local order."""
        coordinate, shape = self._coordinate(rank), tuple(shape)
        intervals: list[tuple[Interval, ...]] = [((0, size),) for size in shape]
        for dim, cuts in _recipe(self, shape):
            intervals[dim] = tuple(_dim_intervals(cuts, shape[dim], coordinate)) or ((shape[dim], 0),)
        return tuple(intervals)

    def boxes(self, rank: int, shape: Sequence[int]) -> tuple[Box, ...]:
        """Return the boxes of ``rank``, in the order of its local tensor.

        One box in most layouts. Block-cyclic and interleaved ones give several; the local tensor is then the boxes
        concatenated along the sharded dim (a row-major grid of boxes if several dims are sharded so). An empty rank, or
        one outside the mesh, has none. The cost does not grow with the number of ranks: O(ndim) for one box.
        """
        if self.mesh.coordinate(rank) is None:
            raise_problems(self.problems(shape))  # an invalid layout raises on every rank
            return ()
        return grid(self.intervals(rank, shape))

    def contributors(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with summands of the value on ``rank``, itself included, in mesh order."""
        ranks: list[list[int]] = [[]]
        for at, spec, size in zip(self._coordinate(rank), self.specs, self.mesh.shape, strict=True):
            choices: Sequence[int] = range(size) if isinstance(spec, PartialSpec) else (at,)
            ranks = [[*head, choice] for head in ranks for choice in choices]
        return tuple(self.mesh.rank_at(coordinate) for coordinate in ranks)

    def is_primary(self, rank: int) -> bool:
        """Return True if ``rank`` is the first of its replicas: it writes, counts or sends for all of them."""
        coordinate = self._coordinate(rank)
        return all(at == 0 for at, spec in zip(coordinate, self.specs, strict=True) if isinstance(spec, ReplicateSpec))

    # ---- comparing --------------------------------------------------------------------------------------------

    def canonical(self, shape: Sequence[int]) -> Layout:
        """Return the plainest layout with the same local tensors for ``shape``.

        Negative dims are counted from the front, axes of one rank replicate, a special placement equal to
        ``torch.chunk`` becomes a plain shard, and an order without effect is dropped.
        """
        shape = tuple(shape)
        raise_problems(self.problems(shape))
        specs = [spec if spec.dim is None else spec.from_front(len(shape)) for spec in self.specs]
        specs = [REPLICATE if size == 1 else spec for size, spec in zip(self.mesh.shape, specs, strict=True)]
        for dim, cuts in cuts_by_dim(self, len(shape)):
            real = [cut for cut in cuts if cut[1] > 1]  # axes of one rank do not shard
            if real:
                at, count, spec = real[0]  # later specs apply to intervals of several lengths: left as written
                plain_cut = (ShardSpec(dim).cut(shape[dim], count, index) for index in range(count))
                if isinstance(spec, ShardSpec) or all(
                    spec.cut(shape[dim], count, index) == cut for index, cut in enumerate(plain_cut)
                ):
                    specs[at] = ShardSpec(dim)
        # The order matters only among axes that still shard, and only if they shard the same dim.
        names = self.mesh.axis_names
        cutting = [axis for axis in (self.order or names) if specs[names.index(axis)].dim is not None]
        grouped = sorted(cutting, key=lambda axis: specs[names.index(axis)].dim or 0)  # stable within a dim
        plain = sorted(grouped, key=lambda axis: (specs[names.index(axis)].dim or 0, names.index(axis)))
        return Layout(self.mesh, tuple(specs), None if grouped == plain else tuple(grouped))

    def equivalent_to(self, other: Layout, shape: Sequence[int]) -> bool:
        """Return True if both give the same local tensors and reductions, in any syntax."""
        if self.canonical(shape) == other.canonical(shape):
            return True  # cheap; else compare rank by rank
        ranks = set(self.mesh.ranks)
        return ranks == set(other.mesh.ranks) and all(
            self.boxes(rank, shape) == other.boxes(rank, shape) and _reductions(self, rank) == _reductions(other, rank)
            for rank in sorted(ranks)
        )

    # ---- inside -----------------------------------------------------------------------------------------------

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            raise PlanError(
                Problem(
                    "rank-outside-mesh",
                    found=f"rank {rank} on a mesh of {self.mesh.world_size} ranks ({self.mesh})",
                    hint="ask for a rank in mesh.ranks",
                )
            )
        return coordinate


def _specs_by_axis(
    mesh: MeshSpec, placements: Sequence[PlacementLike] | Mapping[str, PlacementLike]
) -> dict[str, PlacementSpec]:
    if not isinstance(placements, Mapping):
        listed = list(placements)
        if len(listed) != len(mesh.axis_names):
            raise PlanError(
                Problem(
                    "argument-count",
                    found=f"{len(listed)} placements for the axes {', '.join(mesh.axis_names)}",
                    hint="give one for each axis, or a mapping",
                )
            )
        placements = dict(zip(mesh.axis_names, listed, strict=True))
    specs: dict[str, PlacementSpec] = {}
    problems: list[Problem] = []
    for axis, placement in placements.items():
        try:
            specs[axis] = parse_placement(placement) if isinstance(placement, str) else placement_spec(placement)
        except PlanError as error:
            problems.extend(replace(problem, axis=str(axis)) for problem in error.problems)
    raise_problems(problems)
    return specs


def _axis_problems(
    mesh: MeshSpec, by_axis: Mapping[str, PlacementSpec], specs: tuple[PlacementSpec, ...], order: tuple[str, ...]
) -> list[Problem]:
    problems = [unknown_axis(axis, mesh) for axis in by_axis if axis not in mesh.axis_names]
    for axis, size, spec in zip(mesh.axis_names, mesh.shape, specs, strict=True):
        if isinstance(spec, UnevenShard) and len(spec.sizes) != size:
            problems.append(
                Problem(
                    "argument-count",
                    dim=spec.dim,
                    axis=axis,
                    found=f"{len(spec.sizes)} sizes for {size} ranks",
                    hint="one size for each rank",
                )
            )
        if isinstance(spec, StageShard) and spec.stage >= size:
            problems.append(
                Problem(
                    "index-out-of-range",
                    axis=axis,
                    found=f"stage {spec.stage} of {size}",
                    hint=f"stages are 0 to {size - 1}",
                )
            )
    for axis in order:
        if axis not in mesh.axis_names:
            problems.append(unknown_axis(axis, mesh, "order"))
        elif specs[mesh.axis_names.index(axis)].dim is None:
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "order",
                    axis=axis,
                    found=f"order names {axis}, which shards no dim",
                    hint="leave it out",
                )
            )
    if len(set(order)) != len(order):
        problems.append(Problem("duplicate-name", "order", found=">".join(order), hint="name each axis once"))
    return problems


@lru_cache(maxsize=4096)
def _recipe(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, tuple[Cut, ...]], ...]:
    """Return the sharding axes of each sharded dim, first to last, after validation."""
    raise_problems(layout.problems(shape))  # cached with the result: valid layouts are checked once
    return cuts_by_dim(layout, len(shape))


def cuts_by_dim(layout: Layout, ndim: int) -> tuple[tuple[int, tuple[Cut, ...]], ...]:
    """Return, for each sharded dim, its axes with specs in shard order."""
    names = layout.mesh.axis_names
    positions = [names.index(axis) for axis in layout.order]
    positions += [at for at in range(len(names)) if at not in positions]  # after the named axes, in mesh order
    by_dim: dict[int, list[Cut]] = {}
    for at in positions:
        spec = layout.specs[at]
        if spec.dim is not None:
            by_dim.setdefault(spec.dim % ndim, []).append((at, layout.mesh.shape[at], spec))
    return tuple((dim, tuple(cuts)) for dim, cuts in sorted(by_dim.items()))


def _dim_intervals(cuts: tuple[Cut, ...], length: int, coordinate: tuple[int, ...]) -> list[Interval]:
    at, count, spec = cuts[0]
    intervals = spec.cut(length, count, coordinate[at])
    for at, count, spec in cuts[1:]:
        if not intervals:
            return []  # nothing left to shard
        length = sum(size for _, size in intervals)  # the next axis shards this rank's intervals
        intervals = compose(intervals, spec.cut(length, count, coordinate[at]))
    return merge(intervals) if len(intervals) > 1 else intervals


def _reductions(layout: Layout, rank: int) -> list[tuple[str, frozenset[int]]]:
    """Return the reductions of ``rank``: op and ranks, axis by axis; axes of one op count as one."""
    if not layout.partial:
        return []
    if len(set(layout.partial.values())) == 1:
        group = frozenset(layout.contributors(rank))  # nested sums commute
        return [(next(iter(layout.partial.values())), group)] if len(group) > 1 else []
    reductions = []
    for axis, op in layout.partial.items():
        group = next(frozenset(group) for group in layout.mesh.axis_groups(axis) if rank in group)
        if len(group) > 1:  # a group of one reduces nothing
            reductions.append((op, group))
    return reductions
