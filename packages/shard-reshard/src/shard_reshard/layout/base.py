"""Bound layouts: a layout together with the shape it is for, in the one form that planning works on.

Vocabulary used by all modules that plan:
    piece: a box of the global tensor and where it lies in a rank's local tensors (`Piece`).
    cell: a box of the global tensor that a fixed set of ranks holds (`Cell`); the cells of a layout tile the tensor.
    partial_index: one of the values that a partial layout still has to reduce; layouts without partial axes have one.
    start / stop: first and one-past-last index in each dim, as plain tuples (a `Box` costs more than the work on it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import add, index
from typing import Any, NamedTuple

from shard_reshard._shared.problems import PlanError, Problem

Index = tuple[int, ...]


# Makes a named tuple of a tuple, at half the cost of calling its class: planning for large worlds makes thousands.
new_tuple = tuple.__new__


def sizes_of(shape: Any) -> Index:
    """Return a global shape as whole numbers.

    Raises:
        PlanError: ``invalid-argument`` where it is none.
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
    tensor: int  # which of the rank's local tensors
    local_start: Index  # where in that tensor


class Cell(NamedTuple):
    """A box of the global tensor, the ranks that hold it, and where it lies in their local tensors."""

    start: Index
    stop: Index
    local_start: Index
    owners: tuple[tuple[int, ...], ...]  # for each partial_index, the ranks that hold it
    tensors: Mapping[int, int] | None  # rank -> which local tensor; None: every rank has one


class ShardMap(ABC):
    """Map from ranks to the pieces of a tensor of ``shape`` in their local tensors."""

    shape: Index
    _arguments: tuple[Any, ...]  # of the constructor: they are the identity, and what travels between ranks

    holes = False  # no rank has some elements: a destination may leave them out, a source where no one wants them

    def __eq__(self, other: object) -> bool:
        # The class counts: what is joined in one local tensor lies elsewhere than tensors of its own.
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
        """The ranks that take part, each once; some may hold nothing."""

    @property
    @abstractmethod
    def num_partials(self) -> int:
        """Number of partial values to reduce; 1 where nothing is."""

    @property
    @abstractmethod
    def max_replicas(self) -> int:
        """The largest number of ranks that hold one cell (of one partial_index)."""

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
        """Return the pieces of ``rank`` without empty boxes."""

    def places(self, rank: int) -> tuple[tuple[int, Index], ...] | None:
        """For each local tensor that planning counts, the actual tensor it lies in and where it starts there.

        None: planning and the caller count the same tensors.
        """
        return None

    def local_pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of ``rank`` with their places in its actual local tensors."""
        places = self.places(rank)
        if places is None:
            return self.pieces(rank)
        return tuple(
            Piece(start, stop, places[at][0], tuple(map(add, local, places[at][1])))
            for start, stop, at, local in self.pieces(rank)
        )

    @abstractmethod
    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        """The cells that meet the box, cut down to it."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain data that `shard_map_from_json` reads back."""

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


def shortened(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks[:16])) + (",..." if len(ranks) > 16 else "")
