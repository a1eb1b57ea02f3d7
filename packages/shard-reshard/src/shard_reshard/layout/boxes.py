"""Layouts of explicit boxes, windows of larger tensors, and the sweep for holes and overlaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from math import prod
from operator import add, gt, index, sub
from typing import Any

from shard_spec import Box

from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard.layout.shard_map import Cell, Index, Piece, ShardMap, shortened, sizes_of

_SHOWN = 4  # holes, and overlaps, named in an error; the rest is counted

Span = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dim


def tiling_problems(
    shape: tuple[int, ...],
    spans: Sequence[tuple[str, Span]],
    name: str = "",
    hint: str = "add the missing box",
    kind: str = "rank",
) -> list[Problem]:
    """Return holes and overlaps of spans (each with an owner) in a tensor of ``shape``."""
    # Pairs that overlap, by a sweep along the dim of most distinct starts; without dims every span is the one element.
    pairs: list[tuple[tuple[str, Span], tuple[str, Span]]] = []
    active: list[tuple[str, Span]] = []
    dim = max(range(len(shape)), key=lambda at: len({start[at] for _, (start, _) in spans}), default=None)
    for entry in spans if dim is None else sorted(spans, key=lambda each: (each[1][0][dim], each[1])):
        start, stop = entry[1]
        active = [other for other in active if dim is None or other[1][1][dim] > start[dim]]
        pairs += [
            (other, entry)
            for other in active
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(*other[1], start, stop, strict=True))
        ]
        active.append(entry)
    problems = [
        Problem(
            "boxes-overlap",
            name,
            found=f"{_box(one)!r} of {owner} and {_box(other)!r} of {rival}",
            hint="each element has one place on a rank; only equal boxes may be replicated",
        )
        for (owner, one), (rival, other) in pairs[:_SHOWN]
    ]
    if len(pairs) > _SHOWN:
        problems.append(Problem("boxes-overlap", name, found=f"{len(pairs) - _SHOWN} more overlaps"))
    covered = sum(prod(b - a for a, b in zip(*span, strict=True)) for _, span in spans)
    if prod(shape) and (pairs or covered != prod(shape)):
        holes = _holes(((0,) * len(shape), shape), [span for _, span in spans])
        problems += [
            Problem("boxes-incomplete", name, found=f"no {kind} has {_box(hole)!r}", hint=hint)
            for hole in holes[:_SHOWN]
        ]
        if len(holes) > _SHOWN:
            problems.append(Problem("boxes-incomplete", name, found=f"{len(holes) - _SHOWN} more holes"))
    return problems


def _box(span: Span) -> Box:
    start, stop = span
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def _holes(whole: Span, spans: list[Span], dim: int = 0) -> list[Span]:
    """Return the rest of ``whole`` without ``spans``: slab by slab along ``dim``, recursively."""
    start, stop = whole
    if dim == len(start):  # all dims split: covered, or a hole
        return [] if spans else [whole]
    marks = sorted({start[dim], stop[dim], *(s[0][dim] for s in spans), *(s[1][dim] for s in spans)})
    holes: list[Span] = []
    for low, high in pairwise(marks):
        slab = (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :])
        for hole in _holes(slab, [s for s in spans if s[0][dim] <= low and s[1][dim] >= high], dim + 1):
            # Few large holes in errors, not many slabs: one that goes on along the dim is joined.
            end = (*hole[1][:dim], hole[0][dim], *hole[1][dim + 1 :])
            if holes and holes[-1] == ((*hole[0][:dim], holes[-1][0][dim], *hole[0][dim + 1 :]), end):
                holes[-1] = holes[-1][0], hole[1]
            else:
                holes.append(hole)
    return holes


class BoxShardMap(ShardMap):
    """Explicit boxes: each rank has one local tensor for each of its boxes.

    A box listed by several ranks is replicated on them. Boxes outside of the shape, holes and overlaps are refused by
    name; ``holes`` allows elements without a rank, in partial destinations.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]], holes: bool = False) -> None:
        self.shape, self.num_partials, self.reduce_ops, self.averaged = sizes_of(shape), 1, (), 1
        try:
            self.boxes = {index(rank): tuple(own) for rank, own in sorted(boxes.items())}
        except TypeError as error:
            raise refusal(
                "invalid-argument", "boxes", found=str(error), hint="pass {rank: [Box(offsets, sizes), ...]}"
            ) from None
        self.ranks, problems, owners = tuple(self.boxes), list[Problem](), dict[Span, list[int]]()
        for rank, own in self.boxes.items():
            if rank < 0:
                problems.append(Problem("invalid-argument", found=f"rank {rank}", hint="ranks are counted from 0"))
            for box in own:
                if box.ndim != len(self.shape) or any(map(gt, box.ends, self.shape)):
                    problems.append(
                        Problem(
                            "box-out-of-range",
                            found=f"rank {rank} lists {box!r}",
                            hint=f"boxes lie inside the global shape {self.shape}",
                        )
                    )
                elif box.numel:  # empty ones may lie anywhere; equal ones of several ranks are replicas
                    ranks = owners.setdefault((box.offsets, box.ends), [])
                    if rank in ranks:
                        problems.append(
                            Problem(
                                "boxes-overlap",
                                found=f"rank {rank} lists {box!r} twice",
                                hint="list a box once on a rank",
                            )
                        )
                    ranks.append(rank)
        spans = [(f"rank {ranks[0]}", span) for span, ranks in owners.items()]
        problems = problems or tiling_problems(self.shape, spans)
        self.holes = bool(problems) and {problem.code for problem in problems} == {"boxes-incomplete"}
        if problems and not (holes and self.holes):
            raise PlanError(problems)
        self._arguments: tuple[Any, ...] = self.shape, self.boxes, self.holes

    @classmethod
    def whole(cls, shape: Sequence[int], rank: int) -> BoxShardMap:
        """Return the map with the full tensor on one rank."""
        return cls(shape, {rank: (Box((0,) * len(shape), tuple(shape)),)})

    @property
    def max_replicas(self) -> int:
        return max((len(cell.owners[0]) for cell in self._sorted[1]), default=1)

    @cached_property
    def largest(self) -> int:
        return max((sum(box.numel for box in own) for own in self.boxes.values()), default=0)

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return tuple(box.sizes for box in self.boxes.get(rank, ()))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        zero = (0,) * len(self.shape)
        own = enumerate(self.boxes.get(rank, ()))
        return tuple(Piece(box.offsets, box.ends, tensor, zero) for tensor, box in own if box.numel)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        dim, cells, starts, reach = self._sorted
        if dim < 0:
            yield from cells
            return
        last = bisect_left(starts, stop[dim])
        first = bisect_right(reach, start[dim])  # cells before `first` end at or before start
        for cell in cells[first:last]:
            low = tuple(map(max, cell.start, start))
            high = tuple(map(min, cell.stop, stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(a - b for a, b in zip(low, cell.start, strict=True))
                yield Cell(low, high, local, cell.owners, cell.tensors)

    @cached_property
    def _sorted(self) -> tuple[int, list[Cell], list[int], list[int]]:
        """Return the sort dim (most distinct starts), sorted cells, their starts, and the furthest stops."""
        merged: dict[tuple[Index, Index], dict[int, int]] = {}
        for rank, boxes in self.boxes.items():
            for tensor, box in enumerate(boxes):
                if box.numel:
                    merged.setdefault((box.offsets, box.ends), {})[rank] = tensor
        zero = (0,) * len(self.shape)
        cells = [Cell(start, stop, zero, (tuple(at),), at) for (start, stop), at in merged.items()]
        if not self.shape:  # a scalar has no dim to sort along
            return -1, cells, [], []
        dim = max(range(len(self.shape)), key=lambda d: len({cell.start[d] for cell in cells}))
        cells.sort(key=lambda cell: (cell.start[dim], cell.start))
        reach, furthest = [], 0
        for cell in cells:
            furthest = max(furthest, cell.stop[dim])
            reach.append(furthest)
        return dim, cells, [cell.start[dim] for cell in cells], reach

    def to_json(self) -> dict[str, Any]:
        listed = [[rank, [[list(b.offsets), list(b.sizes)] for b in own]] for rank, own in self.boxes.items()]
        return {"boxes": listed, "holes": True} if self.holes else {"boxes": listed}

    def describe(self) -> str:
        if len(self.boxes) == 1:
            ((rank, boxes),) = self.boxes.items()
            if len(boxes) == 1 and boxes[0].sizes == self.shape:
                return f"whole on rank {rank}"
        return f"{sum(map(len, self.boxes.values()))} boxes on ranks {shortened(tuple(self.boxes))}"


class FusedShardMap(BoxShardMap):
    """Boxes joined along a dim into one local tensor for each rank.

    This is the layout of fused weights, and of key-value heads with copies on several ranks. Planning works on boxes,
    as if each were a tensor; `places` maps them to the actual one. Boxes of a rank are equal in all dims but ``dim``.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]], dim: int, holes: bool = False) -> None:
        super().__init__(shape, boxes, holes)
        self.dim, self._arguments = dim, (self.shape, self.boxes, dim, self.holes)
        rests = {
            (rank, box.offsets[:dim] + box.offsets[dim + 1 :], box.sizes[:dim] + box.sizes[dim + 1 :])
            for rank, own in self.boxes.items()
            for box in own
        }
        if not 0 <= dim < len(self.shape) or len(rests) > len(self.boxes) or not all(self.boxes.values()):
            raise refusal(
                "boxes-incomplete",
                dim=dim,
                found=f"boxes of {self.shape}",
                hint="boxes of one local tensor differ along one dim only, and each rank has one at least",
            )

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        own = self.boxes.get(rank)
        if own is None:
            return ()
        size = sum(box.sizes[self.dim] for box in own)
        return ((*own[0].sizes[: self.dim], size, *own[0].sizes[self.dim + 1 :]),)

    def places(self, rank: int) -> tuple[tuple[int, Index], ...]:
        at, places = 0, []
        for box in self.boxes.get(rank, ()):
            places.append((0, tuple(at if dim == self.dim else 0 for dim in range(len(self.shape)))))
            at += box.sizes[self.dim]
        return tuple(places)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "joined": self.dim}

    def describe(self) -> str:
        return f"{super().describe()}, joined along dim {self.dim}"


# A local tensor's shape, and its boxes of the global tensor with their starts in it.
LocalTensor = tuple[Index, tuple[tuple[Box, Index], ...]]


class PieceShardMap(BoxShardMap):
    """Local tensors by rank, each of several boxes; boxes of different ranks may overlap.

    Scales of a quantised weight lie so: two ranks whose rows meet in a block both have its scale. Planning works on
    boxes that are cut where a box of any rank begins or ends, so that two of them are equal or disjoint.
    """

    def __init__(self, shape: Sequence[int], tensors: Mapping[int, Sequence[LocalTensor]]) -> None:
        self.tensors = {rank: tuple(own) for rank, own in sorted(tensors.items())}
        boxes = [box for own in self.tensors.values() for _, held in own for box, _ in held]
        marks = [sorted({at for b in boxes for at in (b.offsets[d], b.ends[d])}) for d in range(len(shape))]
        cut: dict[int, list[Box]] = {}
        self._places: dict[int, tuple[tuple[int, Index], ...]] = {}
        for rank, own in self.tensors.items():
            cut[rank], places = [], list[tuple[int, Index]]()
            for number, (_, held) in enumerate(own):
                for box, local in held:
                    for part in _cut_at(box, marks):
                        cut[rank].append(part)
                        places.append((number, tuple(map(add, local, map(sub, part.offsets, box.offsets)))))
            self._places[rank] = tuple(places)
        super().__init__(shape, cut)
        self._arguments = self.shape, self.tensors

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return tuple(shape for shape, _ in self.tensors.get(rank, ()))

    def places(self, rank: int) -> tuple[tuple[int, Index], ...]:
        return self._places.get(rank, ())

    def to_json(self) -> dict[str, Any]:
        def tensor(shape: Index, held: Sequence[tuple[Box, Index]]) -> list[Any]:
            return [list(shape), [[list(box.offsets), list(box.sizes), list(local)] for box, local in held]]

        listed = [[rank, [tensor(*entry) for entry in own]] for rank, own in self.tensors.items()]
        return {"tensors": listed}


def _cut_at(box: Box, marks: Sequence[Sequence[int]]) -> Iterator[Box]:
    """Cut a box at ``marks`` of each dim."""
    spans = [
        list(pairwise(at[bisect_left(at, low) : bisect_right(at, high)]))
        for at, low, high in zip(marks, box.offsets, box.ends, strict=True)
    ]
    for combo in product(*spans):
        yield Box(tuple(low for low, _ in combo), tuple(high - low for low, high in combo))


Dims = tuple[int | None, ...]


class ShardMapView(ShardMap):
    """A box of a larger tensor, as a tensor in the same local tensors.

    This serves to move q, k and v into one fused weight, each a window of it. Local tensors are views too: their dims
    are those of the larger tensor's in the order of ``dims``.

    Args:
        base: Layout of the larger tensor.
        start: First index of the window in it.
        shape: Shape of the window, in the view's dims.
        dims: For each dim of the view the base's dim, each once, or None for a new dim of size 1. None for the base's
            own dims.
    """

    def __init__(self, base: ShardMap, start: Sequence[int], shape: Sequence[int], dims: Dims | None = None) -> None:
        self.base, self.dims, self.holes = base, dims, base.holes
        self.ranks, self.num_partials, self.reduce_ops = base.ranks, base.num_partials, base.reduce_ops
        self.averaged = base.averaged
        self.start, self.shape = tuple(start), tuple(shape)
        self._arguments = base, self.start, self.shape, dims
        self._stop = tuple(a + b for a, b in zip(self.start, self._to_base(self.shape), strict=True))
        if any(low < 0 or end > size for low, end, size in zip(self.start, self._stop, base.shape, strict=True)):
            raise refusal(
                "index-out-of-range",
                found=f"window from {self.start} to {self._stop} of a tensor of {base.shape}",
                hint="a window lies inside of the tensor",
            )

    def of(self, base: ShardMap) -> ShardMapView:
        """Return the same window of a tensor of the same shape in another layout."""
        return ShardMapView(base, self.start, self.shape, self.dims)

    @property
    def max_replicas(self) -> int:
        return self.base.max_replicas

    @property
    def largest(self) -> int:
        return min(prod(self.shape), self.base.largest)

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        shapes = self.base.local_shapes(rank)
        return shapes if self.dims is None else tuple(self._from_base(shape, 1) for shape in shapes)

    def places(self, rank: int) -> tuple[tuple[int, Index], ...] | None:
        places = self.base.places(rank)
        if places is None or self.dims is None:
            return places
        return tuple((number, self._from_base(shift, 0)) for number, shift in places)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        pieces = []
        for box in self.base.pieces(rank):
            low, high = tuple(map(max, box.start, self.start)), tuple(map(min, box.stop, self._stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(at + a - b for at, a, b in zip(box.local_start, low, box.start, strict=True))
                pieces.append(Piece(self._inside(low, 0), self._inside(high, 1), box.tensor, self._from_base(local, 0)))
        return tuple(pieces)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        if self.dims is not None and any(a >= b for a, b in zip(start, stop, strict=True)):
            return  # empty along a new dim, which the base cannot see
        for cell in self.base.cross(self.outside(start), self.outside(stop)):
            low, high = self._inside(cell.start, 0), self._inside(cell.stop, 1)
            yield cell._replace(start=low, stop=high, local_start=self._from_base(cell.local_start, 0))

    def to_json(self) -> dict[str, Any]:
        data = {"window": list(self.start), "of": self.base.to_json(), "shape": list(self.base.shape)}
        return data if self.dims is None else {**data, "dims": list(self.dims)}

    def describe(self) -> str:
        order = "" if self.dims is None else f", dims {self.dims}"
        return f"from {self.start} on in {self.base.shape}{order}, {self.base.describe()}"

    def _to_base(self, index: Index) -> Index:
        if self.dims is None:
            return index
        by_dim = {dim: at for dim, at in zip(self.dims, index, strict=True) if dim is not None}
        return tuple(by_dim[dim] for dim in range(len(by_dim)))

    def _from_base(self, index: Index, new: int) -> Index:
        return index if self.dims is None else tuple(new if dim is None else index[dim] for dim in self.dims)

    def _inside(self, index: Index, new: int) -> Index:
        return self._from_base(tuple(a - b for a, b in zip(index, self.start, strict=True)), new)

    def outside(self, index: Index) -> Index:
        """Convert an index of the view to one of the larger tensor."""
        return tuple(a + b for a, b in zip(self._to_base(index), self.start, strict=True))
