"""Who sends to whom: for the common box of a source cell and a destination cell, the moves that fill it.

Every rank works this out for itself and only for the cells that it meets, so the answer depends on nothing but the
two cells and two facts about the plan: whether it relays, and how many bytes an element has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shard_reshard.bound import Cell, Index
from shard_reshard.copies import Move, split_box

# Below this a part is not worth a message of its own: pieces are split among holders in parts of at least so much.
SMALLEST_PART_BYTES = 16 * 1024


def moves(src: Cell, dst: Cell, receivers: Sequence[int], itemsize: int, relay: bool) -> Iterator[Move]:
    """The moves that bring the common box of ``src`` and ``dst`` (cut to the same box) to all ``receivers``."""
    sizes = tuple(b - a for a, b in zip(src.start, src.stop, strict=True))
    if len(src.holders) > 1:
        yield from _reducing(src.holders, receivers, sizes, itemsize, relay)
        return
    (holders,) = src.holders
    zero = (0,) * len(sizes)
    if len(holders) == 1 and len(receivers) == 1:
        yield Move(0, 0, holders[0], receivers[0], zero, sizes)
        return
    holding = set(holders)
    for rank in receivers:
        if rank in holding:
            yield Move(0, 0, rank, rank, zero, sizes)
    lacking = [rank for rank in receivers if rank not in holding]
    if relay and len(lacking) > 1:
        yield from _relayed(holders, lacking, sizes)
    else:
        for rank in lacking:
            yield from _fetched(holders, rank, 0, zero, sizes, itemsize)


def _fetched(
    holders: Sequence[int], rank: int, addend: int, offset: Index, sizes: Index, itemsize: int
) -> Iterator[Move]:
    """``rank`` gets a part from ``holders``: large ones in equal shares, small ones from one of them."""
    if rank in holders:
        yield Move(0, addend, rank, rank, offset, sizes)
        return
    shares = max(1, min(len(holders), prod(sizes) * itemsize // SMALLEST_PART_BYTES))
    for number, (inner, part) in enumerate(split_box(sizes, shares)):
        at = tuple(a + b for a, b in zip(offset, inner, strict=True))
        yield Move(0, addend, holders[(rank + number) % len(holders)], rank, at, part)


def _relayed(holders: Sequence[int], lacking: list[int], sizes: Index) -> Iterator[Move]:
    """Each lacking rank fetches one part, then they pass the parts on among themselves."""
    for number, (offset, part) in enumerate(split_box(sizes, len(lacking))):
        first = lacking[number]
        yield Move(0, 0, holders[number % len(holders)], first, offset, part)
        for rank in lacking:
            if rank != first:
                yield Move(1, 0, first, rank, offset, part)


def _reducing(
    holders: Sequence[Sequence[int]], receivers: Sequence[int], sizes: Index, itemsize: int, relay: bool
) -> Iterator[Move]:
    """Every addend goes to whoever reduces: each receiver, or with ``relay`` one receiver for each part."""
    contributing = {rank for ranks in holders for rank in ranks}
    reducers = [rank for rank in receivers if rank in contributing] or list(receivers)
    if not relay or len(receivers) == 1:
        for rank in receivers:
            for addend, ranks in enumerate(holders):
                yield from _whole(ranks, rank, addend, (0,) * len(sizes), sizes)
        return
    for number, (offset, part) in enumerate(split_box(sizes, len(reducers))):
        first = reducers[number]
        for addend, ranks in enumerate(holders):
            yield from _whole(ranks, first, addend, offset, part)
        for rank in receivers:
            if rank != first:
                yield Move(1, 0, first, rank, offset, part)


def _whole(holders: Sequence[int], rank: int, addend: int, offset: Index, sizes: Index) -> Iterator[Move]:
    """One addend from one holder: all addends of a part have to arrive in the same shape to be reduced."""
    source = rank if rank in holders else holders[rank % len(holders)]
    yield Move(0, addend, source, rank, offset, sizes)
