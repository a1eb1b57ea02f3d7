"""Bound layouts: a layout together with the shape it is for, in the one form that planning works on.

Vocabulary used by all modules that plan:
    piece: a box of the global tensor and where it lies in a rank's local tensors (`Piece`).
    cell: a box of the global tensor that a fixed set of ranks holds (`Cell`); the cells of a layout tile the tensor.
    addend: one of the values that a partial layout still has to reduce; layouts without partial axes have one.
    start / stop: first and one-past-last index in each dim, as plain tuples (a `Box` costs more than the work on it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from operator import ge
from typing import Any, NamedTuple

from shard_spec import Box, Layout, MeshSpec

from shard_reshard.problems import PlanError, Problem

Index = tuple[int, ...]


# Makes a named tuple of a tuple, at half the cost of calling its class: planning for large worlds makes thousands.
new_tuple = tuple.__new__


class Piece(NamedTuple):
    """A box of the global tensor on one rank."""

    start: Index
    stop: Index
    tensor: int  # which of the rank's local tensors
    local_start: Index  # where in that tensor


class Cell(NamedTuple):
    """A box of the global tensor, the ranks that hold it, and where it lies in their local tensors."""

    start: Index
    stop: Index
    local_start: Index
    holders: tuple[tuple[int, ...], ...]  # for each addend, the ranks that hold it
    tensors: Mapping[int, int] | None  # rank -> which local tensor; None: every rank has one

    def tensor_of(self, rank: int) -> int:
        """Which of the local tensors of ``rank`` has this cell."""
        return 0 if self.tensors is None else self.tensors[rank]


class BoundLayout(ABC):
    """Which piece of a tensor of ``shape`` lies where in the local tensors of which rank."""

    shape: Index

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The ranks that take part, each once; some may hold nothing."""

    @property
    @abstractmethod
    def num_addends(self) -> int:
        """How many values are to be reduced; 1 where nothing is."""

    @property
    @abstractmethod
    def max_replicas(self) -> int:
        """The largest number of ranks that hold one cell (of one addend)."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """Elements on the rank that has most."""

    @property
    @abstractmethod
    def reduce_ops(self) -> tuple[str, ...]:
        """The reductions still to be done, one for each partial axis of more than one rank."""

    @abstractmethod
    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        """Shapes of the local tensors of ``rank``; none for a rank that is not part of the layout."""

    @abstractmethod
    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds; empty boxes left out."""

    @abstractmethod
    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        """The cells that meet the box, cut down to it."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain data that `bound_from_json` reads back."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The ranks, for membership tests."""
        return frozenset(self.ranks)

    @cached_property
    def max_rank(self) -> int:
        """The largest rank that is named, -1 where there is none."""
        return max(self.ranks, default=-1)

    def cells(self) -> Iterator[Cell]:
        """All cells."""
        return self.cross((0,) * len(self.shape), self.shape)


class MeshBound(BoundLayout):
    """A shard-spec `Layout` for one shape: every rank of the mesh has one local tensor."""

    def __init__(self, layout: Layout, shape: Sequence[int]) -> None:
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        problems = layout.problems(self.shape)
        if problems:
            raise PlanError(problems)
        self._axes = tuple(zip(layout.mesh.axis_names, layout.mesh.shape, layout.terms, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshBound) and (self.shape, self.layout) == (other.shape, other.layout)

    def __hash__(self) -> int:
        return hash((self.shape, self.layout))

    def __repr__(self) -> str:
        return f"MeshBound({self.layout!r}, {self.shape!r})"

    @property
    def ranks(self) -> Sequence[int]:
        return self.layout.mesh.ranks

    @cached_property
    def num_addends(self) -> int:
        return len(self._offsets_along("P"))

    @cached_property
    def max_replicas(self) -> int:
        return len(self._offsets_along("R"))

    @cached_property
    def largest(self) -> int:
        size = 1
        for table in self._tables:
            lengths: dict[int, int] = {}
            for start, stop, _, flat in table.segments:
                lengths[flat] = lengths.get(flat, 0) + stop - start
            size *= max(lengths.values(), default=0)
        return size

    @cached_property
    def reduce_ops(self) -> tuple[str, ...]:
        return tuple(str(term.arg) for _, size, term in self._axes if term.kind == "P" and size > 1)

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        found = self._local_shapes.get(rank)
        if found is None:
            found = ()
            if rank in self.rank_set:
                found = (tuple(sum(size for _, size in dim) for dim in self.layout.pieces(rank, self.shape)),)
            if len(self._local_shapes) < 8:  # a process asks for its own rank, again and again
                self._local_shapes[rank] = found
        return found

    @cached_property
    def _local_shapes(self) -> dict[int, tuple[Index, ...]]:
        return {}

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self.rank_set:
            return ()
        dims: list[list[tuple[int, int, int]]] = []
        for intervals in self.layout.pieces(rank, self.shape):
            local = 0
            dims.append([])
            for start, size in intervals:
                if size:
                    dims[-1].append((start, start + size, local))
                local += size
        return tuple(
            Piece(tuple(i[0] for i in combo), tuple(i[1] for i in combo), 0, tuple(i[2] for i in combo))
            for combo in product(*dims)
        )

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        if any(map(ge, start, stop)):
            return
        choices = [table.cross(low, high) for table, low, high in zip(self._tables, start, stop, strict=True)]
        holders = self._holders
        cut = [dim for dim, segments in enumerate(choices) if len(segments) != 1]
        if len(cut) > 1 or not choices:
            for combo in product(*choices):
                starts, stops, local_starts, flats = zip(*combo, strict=True) if combo else ((), (), (), ())
                yield Cell(starts, stops, local_starts, holders[sum(flats)], None)
            return
        # One dim is cut, all others are the same in every cell: most layouts of large worlds.
        dim = cut[0] if cut else 0
        alike = [segments[0] for at, segments in enumerate(choices) if at != dim]
        starts, stops, local_starts, flats = zip(*alike, strict=True) if alike else ((), (), (), ())
        base = sum(flats)
        starts_end, stops_end, locals_end = starts[dim:], stops[dim:], local_starts[dim:]
        starts, stops, local_starts = starts[:dim], stops[:dim], local_starts[:dim]
        for low, high, local, flat in choices[dim]:
            yield new_tuple(
                Cell,
                (
                    (*starts, low, *starts_end),
                    (*stops, high, *stops_end),
                    (*local_starts, local, *locals_end),
                    holders[base + flat],
                    None,
                ),
            )

    @cached_property
    def _holders(self) -> _Holders:
        """For a position in the list of ranks: the ranks that hold the same, for each addend."""
        return _Holders(self.layout.mesh.ranks, self._offsets_along("P"), self._offsets_along("R"))

    def to_json(self) -> dict[str, Any]:
        mesh = self.layout.mesh
        ranks = None if mesh.rank_list is None else list(mesh.rank_list)
        return {"mesh": [list(axis) for axis in mesh.axes.items()], "ranks": ranks, "layout": str(self.layout)}

    def describe(self) -> str:
        mesh = self.layout.mesh
        where = "" if mesh.rank_list is None else f" on ranks {_shortened(mesh.rank_list)}"
        return f"{'x'.join(map(str, mesh.shape))}: {self.layout}{where}"

    @cached_property
    def _strides(self) -> dict[str, int]:
        shape = self.layout.mesh.shape
        return {name: prod(shape[at + 1 :]) for at, name in enumerate(self.layout.mesh.axis_names)}

    def _offsets_along(self, kind: str) -> tuple[int, ...]:
        return self._offsets[kind]

    @cached_property
    def _offsets(self) -> dict[str, tuple[int, ...]]:
        """For the partial and the replicated axes: by how much they shift a position in the list of ranks."""
        offsets = {"P": [0], "R": [0]}
        for name, size, term in self._axes:
            if term.kind in offsets:
                stride = self._strides[name]
                offsets[term.kind] = [base + stride * at for base in offsets[term.kind] for at in range(size)]
        return {kind: tuple(found) for kind, found in offsets.items()}

    @cached_property
    def _tables(self) -> tuple[_DimTable, ...]:
        return tuple(_DimTable(self._segments(dim)) for dim in range(len(self.shape)))

    def _segments(self, dim: int) -> list[tuple[int, int, int, int]]:
        """Every interval of ``dim``: (start, stop, local start, shift in the list of ranks)."""
        ndim, length = len(self.shape), self.shape[dim]
        cutting = [
            (name, size, term) for name, size, term in self._axes if term.dim is not None and term.dim % ndim == dim
        ]
        if not cutting:
            return [(0, length, 0, 0)] if length else []
        if len(cutting) == 1 and cutting[0][2].kind == "S":
            name, size, _ = cutting[0]
            stride, step = self._strides[name], -(-length // size)
            return [
                (at * step, min(at * step + step, length), 0, at * stride) for at in range(size) if at * step < length
            ]
        ranks, segments = self.layout.mesh.ranks, []
        for place in product(*(range(size) for _, size, _ in cutting)):
            flat = sum(at * self._strides[name] for at, (name, _, _) in zip(place, cutting, strict=True))
            local = 0
            for start, size in self.layout.pieces(ranks[flat], self.shape)[dim]:
                if size:
                    segments.append((start, start + size, local, flat))
                local += size
        return sorted(segments)


class _Holders(dict[int, tuple[tuple[int, ...], ...]]):
    """Position in the list of ranks -> the ranks that hold the same, for each addend; worked out when asked for."""

    def __init__(self, ranks: Sequence[int], addends: Sequence[int], replicas: Sequence[int]) -> None:
        super().__init__()
        self.ranks, self.addends, self.replicas = tuple(ranks), addends, replicas
        self.alone = len(addends) == len(replicas) == 1
        step = replicas[1] if len(replicas) > 1 else 1
        even = tuple(replicas) == tuple(range(0, step * len(replicas), step))
        self.step = step if even else 0  # replicas that are equally far apart are a slice

    def __missing__(self, flat: int) -> tuple[tuple[int, ...], ...]:
        found: tuple[tuple[int, ...], ...]
        if self.alone:
            found = ((self.ranks[flat],),)
        else:
            found = tuple([self._replicas_of(flat + addend) for addend in self.addends])
        self[flat] = found
        return found

    def _replicas_of(self, flat: int) -> tuple[int, ...]:
        if self.step:
            return self.ranks[flat : flat + self.step * len(self.replicas) : self.step]
        return tuple([self.ranks[flat + at] for at in self.replicas])


class _DimTable:
    """The intervals of one dim, sorted, so that those that meet a range are found by bisection."""

    def __init__(self, segments: list[tuple[int, int, int, int]]) -> None:
        self.segments = segments
        self.starts = [segment[0] for segment in segments]
        self.stops = [segment[1] for segment in segments]

    def cross(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        first, last = bisect_right(self.stops, low), bisect_left(self.starts, high)
        found = self.segments[first:last]
        if not found:
            return found
        if found[0][0] < low:
            start, stop, local, flat = found[0]
            found[0] = (low, stop, local + low - start, flat)
        if found[-1][1] > high:
            start, _, local, flat = found[-1]
            found[-1] = (start, high, local, flat)
        return found


class BoxBound(BoundLayout):
    """Boxes given one by one: each rank has one local tensor for each of its boxes.

    A box that several ranks list is replicated on them.

    Args:
        shape: Shape of the global tensor.
        boxes: For each rank that takes part, its boxes in the order of its local tensors.

    Raises:
        PlanError: With every box outside of the shape, every hole and every overlap, by name.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> None:
        from shard_reshard.coverage import coverage_problems

        self.shape = tuple(int(size) for size in shape)
        self.boxes = {int(rank): tuple(found) for rank, found in sorted(boxes.items())}
        problems = coverage_problems(self.shape, self.boxes)
        if problems:
            raise PlanError(problems)

    @classmethod
    def whole(cls, shape: Sequence[int], rank: int) -> BoxBound:
        """The whole tensor on one rank."""
        return cls(shape, {rank: (Box((0,) * len(shape), tuple(shape)),)})

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.shape, tuple(self.boxes.items())

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxBound) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"BoxBound({self.shape!r}, {self.boxes!r})"

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self.boxes)

    @property
    def num_addends(self) -> int:
        return 1

    @property
    def max_replicas(self) -> int:
        return max((len(cell.holders[0]) for cell in self._sorted[1]), default=1)

    @cached_property
    def largest(self) -> int:
        return max((sum(box.numel for box in found) for found in self.boxes.values()), default=0)

    @property
    def reduce_ops(self) -> tuple[str, ...]:
        return ()

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return tuple(box.sizes for box in self.boxes.get(rank, ()))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        zero = (0,) * len(self.shape)
        found = enumerate(self.boxes.get(rank, ()))
        return tuple(Piece(box.offsets, box.ends, tensor, zero) for tensor, box in found if box.numel)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        dim, cells, starts, reach = self._sorted
        if dim < 0:
            yield from cells
            return
        last = bisect_left(starts, stop[dim])
        first = bisect_right(reach, start[dim])  # every cell before `first` ends at or before start
        for cell in cells[first:last]:
            low = tuple(map(max, cell.start, start))
            high = tuple(map(min, cell.stop, stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(a - b for a, b in zip(low, cell.start, strict=True))
                yield Cell(low, high, local, cell.holders, cell.tensors)

    @cached_property
    def _sorted(self) -> tuple[int, list[Cell], list[int], list[int]]:
        """The cells sorted along the dim that tells most of them apart, their starts, and how far they reach."""
        merged: dict[tuple[Index, Index], dict[int, int]] = {}
        for rank, boxes in self.boxes.items():
            for tensor, box in enumerate(boxes):
                if box.numel:
                    merged.setdefault((box.offsets, box.ends), {})[rank] = tensor
        zero = (0,) * len(self.shape)
        cells = [Cell(start, stop, zero, (tuple(at),), at) for (start, stop), at in merged.items()]
        if not self.shape:
            return -1, cells, [], []
        dim = max(range(len(self.shape)), key=lambda d: len({cell.start[d] for cell in cells}))
        cells.sort(key=lambda cell: (cell.start[dim], cell.start))
        reach, furthest = [], 0
        for cell in cells:
            furthest = max(furthest, cell.stop[dim])
            reach.append(furthest)
        return dim, cells, [cell.start[dim] for cell in cells], reach

    def to_json(self) -> dict[str, Any]:
        listed = [[rank, [[list(b.offsets), list(b.sizes)] for b in found]] for rank, found in self.boxes.items()]
        return {"boxes": listed}

    def describe(self) -> str:
        if len(self.boxes) == 1:
            ((rank, boxes),) = self.boxes.items()
            if len(boxes) == 1 and boxes[0].sizes == self.shape:
                return f"whole on rank {rank}"
        return f"{sum(map(len, self.boxes.values()))} boxes on ranks {_shortened(tuple(self.boxes))}"


class WindowBound(BoundLayout):
    """A box of a larger tensor as a tensor of its own, lying where it lies in the larger one's local tensors.

    The way to move q, k and v into one fused weight: each is a window of it.

    Args:
        base: How the larger tensor lies.
        start: Where the window begins in it.
        shape: How large the window is.
    """

    def __init__(self, base: BoundLayout, start: Sequence[int], shape: Sequence[int]) -> None:
        self.base = base
        self.start, self.shape = tuple(start), tuple(shape)
        ends = tuple(a + b for a, b in zip(self.start, self.shape, strict=True))
        if any(low < 0 or end > size for low, end, size in zip(self.start, ends, base.shape, strict=True)):
            found = f"window {Box(tuple(max(0, low) for low in self.start), self.shape)!r} of a tensor of {base.shape}"
            raise PlanError(Problem("window-outside", found=found, hint="a window lies inside of the tensor"))

    def __eq__(self, other: object) -> bool:
        key = (self.base, self.start, self.shape)
        return isinstance(other, WindowBound) and key == (other.base, other.start, other.shape)

    def __hash__(self) -> int:
        return hash((self.base, self.start, self.shape))

    def __repr__(self) -> str:
        return f"WindowBound({self.base!r}, {self.start!r}, {self.shape!r})"

    @property
    def ranks(self) -> Sequence[int]:
        return self.base.ranks

    @property
    def num_addends(self) -> int:
        return self.base.num_addends

    @property
    def max_replicas(self) -> int:
        return self.base.max_replicas

    @property
    def largest(self) -> int:
        return min(prod(self.shape), self.base.largest)

    @property
    def reduce_ops(self) -> tuple[str, ...]:
        return self.base.reduce_ops

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return self.base.local_shapes(rank)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        found = []
        stop = tuple(a + b for a, b in zip(self.start, self.shape, strict=True))
        for piece in self.base.pieces(rank):
            low, high = tuple(map(max, piece.start, self.start)), tuple(map(min, piece.stop, stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(at + a - b for at, a, b in zip(piece.local_start, low, piece.start, strict=True))
                found.append(Piece(self._inside(low), self._inside(high), piece.tensor, local))
        return tuple(found)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        for cell in self.base.cross(self._outside(start), self._outside(stop)):
            yield cell._replace(start=self._inside(cell.start), stop=self._inside(cell.stop))

    def to_json(self) -> dict[str, Any]:
        return {"window": list(self.start), "of": self.base.to_json(), "shape": list(self.base.shape)}

    def describe(self) -> str:
        return f"from {self.start} on in {self.base.shape}, {self.base.describe()}"

    def _inside(self, index: Index) -> Index:
        return tuple(a - b for a, b in zip(index, self.start, strict=True))

    def _outside(self, index: Index) -> Index:
        return tuple(a + b for a, b in zip(index, self.start, strict=True))


def bound_from_json(shape: Sequence[int], data: Mapping[str, Any]) -> BoundLayout:
    """Read what ``to_json`` wrote."""
    if "window" in data:
        return WindowBound(bound_from_json(data["shape"], data["of"]), data["window"], shape)
    if "boxes" in data:
        return BoxBound(shape, {rank: [Box(tuple(o), tuple(s)) for o, s in found] for rank, found in data["boxes"]})
    mesh = MeshSpec(dict(data["mesh"]), data["ranks"])
    return MeshBound(Layout.parse(data["layout"], mesh), shape)


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks[:16])) + (",..." if len(ranks) > 16 else "")
