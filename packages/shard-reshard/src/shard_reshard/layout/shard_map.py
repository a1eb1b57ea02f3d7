"""Shard maps: a layout together with its shape, the one form used in planning.

Vocabulary of all planning modules:
    piece: a box of the global tensor with its position in a rank's local tensors (`Piece`).
    cell: a box of the global tensor with a fixed set of owners (`Cell`); the cells of a layout tile the tensor.
    partial_index: index of an unreduced value of a partial layout; layouts without partial axes have one.
    start / stop: first and one-past-last index in each dim, as plain tuples (a `Box` costs more than the work on it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from operator import add, ge, index
from typing import TYPE_CHECKING, Any, NamedTuple

from shard_spec import Layout

from shard_reshard._shared.problems import PlanError, Problem

if TYPE_CHECKING:
    import torch


ITEMSIZES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}

FLOATING = frozenset(name for name in ITEMSIZES if name.startswith(("float", "bfloat", "complex")))
# Dtypes reduced in float32 and rounded once at the end.
REDUCED_IN_FLOAT32 = frozenset(name for name in FLOATING if name.startswith(("float16", "bfloat16", "float8")))
_SPELLINGS = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_SPELLINGS |= {"short": "int16", "cfloat": "complex64", "cdouble": "complex128"}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the plain name of a dtype: ``"float32"`` for ``torch.float32``, ``"torch.float"`` and ``"float32"``."""
    name = str(dtype).removeprefix("torch.")
    name = _SPELLINGS.get(name, name)
    if name not in ITEMSIZES:
        raise PlanError(Problem("unsupported-dtype", "dtype", found=repr(dtype), hint=f"one of {', '.join(ITEMSIZES)}"))
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``."""
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


Index = tuple[int, ...]


# Converts a tuple to a named tuple at half the cost of its class: planning for large worlds makes thousands.
new_tuple = tuple.__new__


def sizes_of(shape: Any) -> Index:
    """Return a global shape as integers.

    Raises:
        PlanError: ``invalid-argument`` for anything else.
    """
    try:
        sizes = () if isinstance(shape, str) else tuple(map(index, shape))
        if isinstance(shape, str) or any(size < 0 for size in sizes):
            raise TypeError
    except TypeError:
        hint = "sizes are whole numbers, 0 or more, one for each dim"
        raise PlanError(Problem("invalid-argument", "shape", found=repr(shape), hint=hint)) from None
    return sizes


class Piece(NamedTuple):
    """A box of the global tensor on one rank."""

    start: Index
    stop: Index
    tensor: int  # index among the rank's local tensors
    local_start: Index  # start in that tensor


class Cell(NamedTuple):
    """A box of the global tensor, with owners and position in their local tensors."""

    start: Index
    stop: Index
    local_start: Index
    owners: tuple[tuple[int, ...], ...]  # for each partial_index, its ranks
    tensors: Mapping[int, int] | None  # rank -> index of its local tensor; None: every rank has one


class ShardMap(ABC):
    """Map from ranks to the pieces of a tensor of ``shape`` in their local tensors."""

    shape: Index
    _arguments: tuple[Any, ...]  # of the constructor: identity, and pickled form

    holes = False  # elements without a rank: allowed in destinations, and in sources if no destination needs them

    def __eq__(self, other: object) -> bool:
        # The class counts: boxes joined in one local tensor differ from tensors of their own.
        return type(other) is type(self) and self._arguments == other._arguments

    @cached_property
    def _hash(self) -> int:
        return hash(self._arguments)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._arguments!r}"

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The participating ranks, each once; some may be empty."""

    @property
    @abstractmethod
    def num_partials(self) -> int:
        """Number of partial values to reduce; 1 if there are none."""

    @property
    @abstractmethod
    def max_replicas(self) -> int:
        """Largest number of owners of one cell (of one partial_index)."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """Number of elements on the fullest rank."""

    @property
    @abstractmethod
    def reduce_ops(self) -> tuple[str, ...]:
        """Pending reductions, one for each partial axis of more than one rank."""

    @abstractmethod
    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        """Return the shapes of the local tensors of ``rank``; none for a rank outside of the layout."""

    @abstractmethod
    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of ``rank`` without empty boxes."""

    def places(self, rank: int) -> tuple[tuple[int, Index], ...] | None:
        """Return, for each planned local tensor, the actual one's index and the start there.

        None: planning and the caller use the same tensors.
        """
        return None

    def local_pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of ``rank`` with their positions in its actual local tensors."""
        places = self.places(rank)
        if places is None:
            return self.pieces(rank)
        return tuple(
            Piece(start, stop, places[at][0], tuple(map(add, local, places[at][1])))
            for start, stop, at, local in self.pieces(rank)
        )

    @abstractmethod
    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        """Yield the cells that meet the box, clipped to it."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return plain data, equal for equal maps."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the map in one line for people."""

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """Ranks as a set, for membership tests."""
        return frozenset(self.ranks)

    @cached_property
    def max_rank(self) -> int:
        """Largest rank, -1 if there is none."""
        return max(self.ranks, default=-1)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells."""
        return self.cross((0,) * len(self.shape), self.shape)


def shortened(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks[:16])) + (",..." if len(ranks) > 16 else "")


class MeshShardMap(ShardMap):
    """A shard-spec `Layout` for one shape: every rank of the mesh has one local tensor."""

    def __init__(self, layout: Layout, shape: Sequence[int]) -> None:
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._arguments = layout, self.shape
        self._local_shapes: dict[int, tuple[Index, ...]] = {}
        problems = layout.problems(self.shape)
        if problems:
            raise PlanError(problems)
        self._axes = tuple(zip(layout.mesh.axis_names, layout.mesh.shape, layout.specs, strict=True))

    @property
    def ranks(self) -> Sequence[int]:
        return self.layout.mesh.ranks

    @cached_property
    def num_partials(self) -> int:
        return len(self._offsets["P"])

    @cached_property
    def max_replicas(self) -> int:
        return len(self._offsets["R"])

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
        return tuple(op for axis, op in self.layout.partial.items() if self.layout.mesh.axis_size(axis) > 1)

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        found = self._local_shapes.get(rank)
        if found is None:
            found = ()
            if rank in self.rank_set:
                found = (tuple(sum(size for _, size in dim) for dim in self.layout.intervals(rank, self.shape)),)
            if len(self._local_shapes) < 8:  # bounded: a process uses its own rank only
                self._local_shapes[rank] = found
        return found

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self.rank_set:
            return ()
        dims: list[list[tuple[int, int, int]]] = []
        for intervals in self.layout.intervals(rank, self.shape):
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
        owners = self._holders
        cut = [dim for dim, segments in enumerate(choices) if len(segments) != 1]
        if len(cut) > 1 or not choices:
            for combo in product(*choices):
                starts, stops, local_starts, flats = zip(*combo, strict=True) if combo else ((), (), (), ())
                yield Cell(starts, stops, local_starts, owners[sum(flats)], None)
            return
        # Fast path: one dim is sharded, all others are equal in every cell; most layouts of large worlds.
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
                    owners[base + flat],
                    None,
                ),
            )

    @cached_property
    def _holders(self) -> _Holders:
        """Map a position among the ranks to its cell's owners, for each partial_index."""
        return _Holders(self.layout.mesh.ranks, self._offsets["P"], self._offsets["R"])

    def to_json(self) -> dict[str, Any]:
        mesh = self.layout.mesh
        ranks = None if mesh.rank_list is None else list(mesh.rank_list)
        return {"mesh": [list(axis) for axis in mesh.axes.items()], "ranks": ranks, "layout": str(self.layout)}

    def describe(self) -> str:
        mesh = self.layout.mesh
        where = "" if mesh.rank_list is None else f" on ranks {shortened(mesh.rank_list)}"
        return f"{'x'.join(map(str, mesh.shape))}: {self.layout}{where}"

    @cached_property
    def _strides(self) -> dict[str, int]:
        shape = self.layout.mesh.shape
        return {name: prod(shape[at + 1 :]) for at, name in enumerate(self.layout.mesh.axis_names)}

    @cached_property
    def _offsets(self) -> dict[str, tuple[int, ...]]:
        """Return, for partial and replicated axes, their shifts of a position in the list of ranks."""
        offsets = {"P": [0], "R": [0]}
        for name, size, term in self._axes:
            if term.dim is None:
                kind, stride = "P" if name in self.layout.partial else "R", self._strides[name]
                offsets[kind] = [base + stride * at for base in offsets[kind] for at in range(size)]
        return {kind: tuple(found) for kind, found in offsets.items()}

    @cached_property
    def _tables(self) -> tuple[_DimTable, ...]:
        return tuple(_DimTable(self._segments(dim)) for dim in range(len(self.shape)))

    def _segments(self, dim: int) -> list[tuple[int, int, int, int]]:
        """Return every interval of ``dim``: (start, stop, local start, shift in the list of ranks)."""
        ndim, length = len(self.shape), self.shape[dim]
        cutting = [
            (name, size, term) for name, size, term in self._axes if term.dim is not None and term.dim % ndim == dim
        ]
        if not cutting:
            return [(0, length, 0, 0)] if length else []
        if len(cutting) == 1 and str(cutting[0][2]).startswith("S("):
            name, size, _ = cutting[0]
            stride, step = self._strides[name], -(-length // size)
            return [
                (at * step, min(at * step + step, length), 0, at * stride) for at in range(size) if at * step < length
            ]
        ranks, segments = self.layout.mesh.ranks, []
        for place in product(*(range(size) for _, size, _ in cutting)):
            flat = sum(at * self._strides[name] for at, (name, _, _) in zip(place, cutting, strict=True))
            local = 0
            for start, size in self.layout.intervals(ranks[flat], self.shape)[dim]:
                if size:
                    segments.append((start, start + size, local, flat))
                local += size
        return sorted(segments)


class _Holders(dict[int, tuple[tuple[int, ...], ...]]):
    """Lazy map: position in the list of ranks -> owners of the same cell, for each addend."""

    def __init__(self, ranks: Sequence[int], addends: Sequence[int], replicas: Sequence[int]) -> None:
        super().__init__()
        self.ranks, self.addends, self.replicas = tuple(ranks), addends, replicas
        self.alone = len(addends) == len(replicas) == 1  # fully sharded
        step = replicas[1] if len(replicas) > 1 else 1
        even = tuple(replicas) == tuple(range(0, step * len(replicas), step))
        self.step = step if even else 0  # equidistant replicas are a slice

    def __missing__(self, flat: int) -> tuple[tuple[int, ...], ...]:
        found: tuple[tuple[int, ...], ...]
        if self.alone:
            found = ((self.ranks[flat],),)
        elif self.step:
            length, step = self.step * len(self.replicas), self.step
            found = tuple([self.ranks[flat + at : flat + at + length : step] for at in self.addends])
        else:
            found = tuple([tuple([self.ranks[flat + at + other] for other in self.replicas]) for at in self.addends])
        self[flat] = found
        return found


class _DimTable:
    """The sorted intervals of one dim, for lookups by bisection."""

    def __init__(self, segments: list[tuple[int, int, int, int]]) -> None:
        self.segments = segments
        self.starts = [segment[0] for segment in segments]
        self.stops = [segment[1] for segment in segments]

    def cross(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        first, last = bisect_right(self.stops, low), bisect_left(self.starts, high)
        found = self.segments[first:last]
        if not found:
            return found
        if found[0][0] < low:  # clip the first
            start, stop, local, flat = found[0]
            found[0] = (low, stop, local + low - start, flat)
        if found[-1][1] > high:  # clip the last
            start, _, local, flat = found[-1]
            found[-1] = (start, high, local, flat)
        return found
