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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from operator import add, ge, index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shard_spec import Layout

from shard_reshard._shared.dtypes import FLOATING, ITEM_BYTES
from shard_reshard._shared.problems import PlanError, refusal

if TYPE_CHECKING:
    import torch

# Without complex32: torch warns of every tensor of it, and compares none.
ITEMSIZES = {name: num_bytes for name, num_bytes in ITEM_BYTES.items() if name != "complex32"}
FLOAT8 = frozenset(name for name in FLOATING if name.startswith("float8"))
# Dtypes reduced in float32 and rounded once at the end.
REDUCED_IN_FLOAT32 = frozenset(name for name in FLOATING if name.startswith(("float16", "bfloat16", "float8")))


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the plain name of a dtype: ``"float32"`` for ``torch.float32`` and ``"float32"``."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise refusal("unsupported-dtype", "dtype", found=repr(dtype), hint=f"one of {', '.join(ITEMSIZES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def loses_values(source: str, target: str) -> bool:
    """Return True for a cast to a dtype that lacks most numbers of ``source``.

    Floats become 0 in integers, bools and, without a scale, in float8; integers wrap around in narrower ones.
    """
    if source in FLOATING:
        return source != target and (target not in FLOATING or (target in FLOAT8 and source not in FLOAT8))
    (signed, bits), (keeps_sign, room) = map(_number_bits, (source, target))
    return target not in FLOATING and (bits > room or (signed and not keeps_sign))


def _number_bits(dtype: str) -> tuple[bool, int]:
    """Return whether an integer dtype has a sign, and its other bits: 7 of int8, 1 of bool."""
    signed = dtype.startswith("int")
    return signed, 1 if dtype == "bool" else 8 * ITEMSIZES[dtype] - signed


def human(num_bytes: int) -> str:
    """Format bytes: ``"1.5 MiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


Index = tuple[int, ...]


# Converts a tuple to a named tuple at half the cost of its class: planning for large worlds makes thousands.
new_tuple = tuple.__new__


def sizes_of(shape: Any, layout: str = "") -> Index:
    """Return a global shape as integers, or refuse it; ``layout`` names a layout that lacks it."""
    if shape is None and layout:
        raise refusal(
            "missing-argument", "shape", found=f"{layout} has no tensor size", hint="pass shape=, the global shape"
        )
    try:
        sizes = () if isinstance(shape, str) else tuple(map(index, shape))
        if isinstance(shape, str) or any(size < 0 for size in sizes):
            raise TypeError
    except TypeError:
        raise refusal(
            "invalid-argument",
            "shape",
            found=repr(shape),
            hint="sizes are whole numbers, 0 or more, one for each dim",
        ) from None
    return sizes


K = TypeVar("K")
V = TypeVar("V")


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key in their order: ``{"a": [1, 3], "b": [2]}`` of a 1, b 2, a 3."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


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
    ranks: Sequence[int]  # those that take part, each once; some may hold nothing
    num_partials: int  # of values that are still to be reduced; 1 where nothing is
    reduce_ops: tuple[str, ...]  # one for each partial axis of more than one rank
    averaged: int  # number of partial values that make an average; 1 where none does
    holes = False  # no rank has some elements: a destination may leave them out, a source where no one wants them

    # Of the constructor: they are the identity, and what travels between ranks. The class counts as well: what is
    # joined in one local tensor lies elsewhere than tensors of its own.
    _arguments: tuple[Any, ...]
    _hash: int | None = None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._arguments == other._arguments

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple([tuple(a.items()) if isinstance(a, dict) else a for a in self._arguments]))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._arguments!r}"

    @property
    @abstractmethod
    def max_replicas(self) -> int:
        """Largest number of owners of one cell (of one partial_index)."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """Number of elements on the fullest rank."""

    @abstractmethod
    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        """Return the shapes of the local tensors of ``rank``. None for a rank outside of the layout."""

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

    def cells(self) -> Iterator[Cell]:
        """Yield all cells."""
        return self.cross((0,) * len(self.shape), self.shape)


def shortened(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks[:16])) + (",..." if len(ranks) > 16 else "")


class MeshShardMap(ShardMap):
    """A shard-spec `Layout` for one shape: every rank of the mesh has one local tensor."""

    max_replicas = 1

    def __init__(self, layout: Layout, shape: Sequence[int]) -> None:
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._arguments = layout, self.shape
        self._local_shapes: dict[int, tuple[Index, ...]] = {}
        if problems := layout.problems(self.shape):
            raise PlanError(problems)
        mesh, partial = layout.mesh, layout.partial
        self.ranks = mesh.ranks
        self.reduce_ops = tuple(op for axis, op in partial.items() if mesh.axis_size(axis) > 1)
        self.averaged = prod(mesh.axis_size(axis) for axis, op in partial.items() if op == "avg")
        # Axis by axis its size, its spec, and by how much a step along it shifts a position in the list of ranks.
        strides = [prod(mesh.shape[at + 1 :]) for at in range(len(mesh.shape))]
        self._axes = tuple(zip(mesh.shape, layout.specs, strides, strict=True))
        # By how much partial values, and replicas of one, are apart in the list of ranks.
        partials, replicas = [0], [0]
        for name, (size, spec, stride) in zip(mesh.axis_names, self._axes, strict=True):
            if spec.dim is None and name in partial:
                partials = [base + stride * at for base in partials for at in range(size)]
            elif spec.dim is None:
                replicas = [base + stride * at for base in replicas for at in range(size)]
        self.num_partials, self._owners = len(partials), dict[int, tuple[tuple[int, ...], ...]]()
        self.max_replicas, self._distances = len(replicas), (partials, replicas)

    @cached_property
    def largest(self) -> int:
        size = 1
        for segments, _, _ in self._tables:
            lengths: dict[int, int] = {}
            for start, stop, _, flat in segments:
                lengths[flat] = lengths.get(flat, 0) + stop - start
            size *= max(lengths.values(), default=0)
        return size

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        shapes = self._local_shapes.get(rank)
        if shapes is None:
            shapes = ()
            if rank in self.rank_set:
                shapes = (tuple(sum(size for _, size in dim) for dim in self.layout.intervals(rank, self.shape)),)
            if len(self._local_shapes) < 8:  # bounded: a process uses its own rank only
                self._local_shapes[rank] = shapes
        return shapes

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
        choices: list[list[Segment]] = []  # for each dim the segments that meet the box, cut to it
        for (segments, begins, ends), low, high in zip(self._tables, start, stop, strict=True):
            met = segments[bisect_right(ends, low) : bisect_left(begins, high)]
            if met and met[0][0] < low:
                begin, end, local, flat = met[0]
                met[0] = low, end, local + low - begin, flat
            if met and met[-1][1] > high:
                met[-1] = met[-1][0], high, *met[-1][2:]
            choices.append(met)
        cut = [dim for dim, segments in enumerate(choices) if len(segments) != 1]
        if len(cut) > 1 or not choices:
            for combo in product(*choices):
                starts, stops, local_starts, flats = zip(*combo, strict=True) if combo else ((), (), (), ())
                yield Cell(starts, stops, local_starts, self._held_by(sum(flats)), None)
            return
        # One dim is cut, all others are the same in every cell: most layouts of large worlds.
        dim, owners = cut[0] if cut else 0, self._owners
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
                    owners.get(base + flat) or self._held_by(base + flat),
                    None,
                ),
            )

    def _held_by(self, flat: int) -> tuple[tuple[int, ...], ...]:
        """For each partial value, the ranks with the data of position ``flat``."""
        if flat not in self._owners:
            ranks, (partials, replicas) = self.ranks, self._distances
            self._owners[flat] = tuple(tuple([ranks[flat + at + to] for to in replicas]) for at in partials)
        return self._owners[flat]

    def to_json(self) -> dict[str, Any]:
        mesh = self.layout.mesh
        ranks = None if mesh.rank_list is None else list(mesh.rank_list)
        return {"mesh": [list(axis) for axis in mesh.axes.items()], "ranks": ranks, "layout": str(self.layout)}

    def describe(self) -> str:
        mesh = self.layout.mesh
        where = "" if mesh.rank_list is None else f" on ranks {shortened(mesh.rank_list)}"
        return f"{'x'.join(map(str, mesh.shape))}: {self.layout}{where}"

    @cached_property
    def _tables(self) -> list[tuple[list[Segment], list[int], list[int]]]:
        """For each dim its intervals in ascending order, and their starts and stops for bisection."""
        tables = []
        for dim, length in enumerate(self.shape):
            cutting = [axis for axis in self._axes if axis[1].dim is not None and axis[1].dim % len(self.shape) == dim]
            segments: list[Segment] = []
            if not cutting and length:
                segments = [(0, length, 0, 0)]
            elif len(cutting) == 1 and str(cutting[0][1]).startswith("S("):
                size, _, stride = cutting[0]
                step = max(1, -(-length // size))
                starts = range(0, length, step)
                segments = [(low, min(low + step, length), 0, at * stride) for at, low in enumerate(starts)]
            elif cutting:
                for place in product(*(range(size) for size, _, _ in cutting)):
                    flat, local = sum(at * stride for at, (_, _, stride) in zip(place, cutting, strict=True)), 0
                    for start, size in self.layout.intervals(self.ranks[flat], self.shape)[dim]:
                        if size:
                            segments.append((start, start + size, local, flat))
                        local += size
            segments.sort()
            tables.append((segments, [entry[0] for entry in segments], [entry[1] for entry in segments]))
        return tables


Segment = tuple[int, int, int, int]  # start, stop, local start, shift in the list of ranks
