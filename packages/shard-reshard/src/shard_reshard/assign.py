"""Who sends to whom: for the common box of a source cell and a destination cell, the moves that fill it.

Every rank works this out for itself and only for the cells that it meets, so the answer depends on nothing but the
two cells and two facts about the plan: whether it relays, and how many bytes an element has. With ``me`` only the
moves that begin or end on one rank are made: with many replicas the others are far more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import sub

from shard_reshard.bound import Cell, Index, new_tuple
from shard_reshard.copies import Move, split_box

# Below this a part is not worth a message of its own: pieces are split among holders in parts of at least so much.
SMALLEST_PART_BYTES = 16 * 1024


def moves(
    src: Cell, dst: Cell, receivers: Sequence[int], itemsize: int, relay: bool, me: int | None = None
) -> Iterator[Move]:
    """The moves that bring the common box of ``src`` and ``dst`` (cut to the same box) to all ``receivers``."""
    sizes = tuple(map(sub, src.stop, src.start))
    if len(src.holders) > 1:
        yield from _reducing(src.holders, receivers, sizes, relay, me)
        return
    (holders,) = src.holders
    zero = (0,) * len(sizes)
    if len(holders) == 1 and len(receivers) == 1:
        yield Move(0, 0, holders[0], receivers[0], zero, sizes)
        return
    holding = holders if len(holders) < 8 else frozenset(holders)
    for rank in receivers if me is None else (me,) if me in receivers else ():
        if rank in holding:
            yield Move(0, 0, rank, rank, zero, sizes)
    if relay:
        lacking = [rank for rank in receivers if rank not in holding]
        if len(lacking) > 1:
            yield from _relayed(holders, lacking, sizes, me)
            return
    if len(holders) == 1 and (me is None or me in holding):
        for rank in receivers:
            if rank != holders[0]:
                yield new_tuple(Move, (0, 0, holders[0], rank, zero, sizes))
    elif me is None or me in holding:
        for rank in receivers:
            if rank not in holding:
                for move in fetched(holders, rank, sizes, itemsize):
                    if me is None or move.src_rank == me:
                        yield move
    elif me in receivers:
        yield from fetched(holders, me, sizes, itemsize)


def num_shares(holders: Sequence[int], sizes: Index, itemsize: int) -> int:
    """In how many parts a box is fetched; one where the result is not above 1."""
    return min(len(holders), prod(sizes) * itemsize // SMALLEST_PART_BYTES)


def fetched(holders: Sequence[int], rank: int, sizes: Index, itemsize: int) -> Iterator[Move]:
    """``rank`` gets a box from ``holders``: a large one in equal shares, a small one from one of them."""
    shares = num_shares(holders, sizes, itemsize)
    if shares <= 1:
        yield Move(0, 0, holders[rank % len(holders)], rank, (0,) * len(sizes), sizes)
        return
    for number, (offset, part) in enumerate(split_box(sizes, shares)):
        yield Move(0, 0, holders[(rank + number) % len(holders)], rank, offset, part)


def _relayed(holders: Sequence[int], lacking: list[int], sizes: Index, me: int | None) -> Iterator[Move]:
    """Each lacking rank fetches one part, then they pass the parts on among themselves."""
    for number, (offset, part) in enumerate(split_box(sizes, len(lacking))):
        first, holder = lacking[number], holders[number % len(holders)]
        if me is None or me in (first, holder):
            yield Move(0, 0, holder, first, offset, part)
        yield from _passed_on(first, lacking, offset, part, me)


def _passed_on(first: int, receivers: Sequence[int], offset: Index, part: Index, me: int | None) -> Iterator[Move]:
    """One part from the rank that has it to all others."""
    for rank in receivers if me is None or me == first else (me,) if me in receivers else ():
        if rank != first:
            yield Move(1, 0, first, rank, offset, part)


def _reducing(
    holders: Sequence[Sequence[int]], receivers: Sequence[int], sizes: Index, relay: bool, me: int | None
) -> Iterator[Move]:
    """Every addend goes to whoever reduces: each receiver, or with ``relay`` one receiver for each part."""
    if not relay or len(receivers) == 1:
        zero = (0,) * len(sizes)
        for rank in receivers:
            yield from _addends(holders, rank, zero, sizes, me)
        return
    contributing = {rank for ranks in holders for rank in ranks}
    reducers = [rank for rank in receivers if rank in contributing] or list(receivers)
    for number, (offset, part) in enumerate(split_box(sizes, len(reducers))):
        yield from _addends(holders, reducers[number], offset, part, me)
        yield from _passed_on(reducers[number], receivers, offset, part, me)


def _addends(
    holders: Sequence[Sequence[int]], rank: int, offset: Index, sizes: Index, me: int | None
) -> Iterator[Move]:
    """All addends to one rank, each from one holder: they have to arrive in one shape to be reduced."""
    everything = me is None or me == rank
    for addend, ranks in enumerate(holders):
        if everything or me in ranks:
            source = rank if rank in ranks else ranks[rank % len(ranks)]
            if everything or source == me:
                yield Move(0, addend, source, rank, offset, sizes)
