"""Terms: how one mesh axis cuts one dim, as plain tuples that need no torch.

A ``Term`` is what a placement says, stripped of its class. A layout computes with terms, so that values and plans work
without importing ``torch.distributed.tensor`` (1 to 3 seconds); placements are made from terms where someone asks.

Vocabulary: a term is applied to a *stretch*, the part of the dim that the axes before it left on this rank. It answers
with *pieces*: ``(offset, size)`` intervals of the stretch, in the order in which they lie in the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Piece = tuple[int, int]

# A rank that would hold more pieces of one dim than this was not meant; a plan from a file must not hang its reader.
MAX_PIECES = 1 << 20
MAX_SECTIONS = 1 << 16

REDUCE_OPS = ("sum", "avg", "min", "max", "product")


class Term(NamedTuple):
    """One placement: its kind, the dim it cuts (None if none), and what else it says.

    ``kind`` is the letter of the text form: R replicate, P partial (arg: op), S shard, U uneven (arg: sizes),
    B blocks (arg: (block, cyclic)), I interleaved (arg: number of sections, or their sizes).
    """

    kind: str
    dim: int | None = None
    arg: object = None


REPLICATE = Term("R")


def chunk(length: int, count: int, index: int) -> Piece:
    """Piece ``index`` of ``torch.chunk``: all pieces but the last are ``ceil(length / count)`` long, some are empty."""
    step = -(-length // count)
    start = min(index * step, length)
    return start, min(step, length - start)


def pieces(term: Term, length: int, count: int, index: int) -> list[Piece]:
    """The pieces of a stretch that go to rank ``index`` of ``count`` along the axis; empty ones are left out."""
    if term.kind == "S":
        piece = chunk(length, count, index)
        return [piece] if piece[1] else []
    return [piece for piece in _PIECES[term.kind](term.arg, length, count, index) if piece[1]]


def _uneven(arg: object, length: int, count: int, index: int) -> Iterator[Piece]:
    assert isinstance(arg, tuple)
    yield sum(arg[:index]), arg[index]


def _blocks(arg: object, length: int, count: int, index: int) -> Iterator[Piece]:
    assert isinstance(arg, tuple)
    block, cyclic = arg
    num_blocks = -(-length // block)
    if cyclic:
        for at in range(index, num_blocks, count):
            yield at * block, min(block, length - at * block)
    else:
        first, taken = chunk(num_blocks, count, index)
        start = min(first * block, length)
        yield start, min(taken * block, length - start)


def _interleaved(arg: object, length: int, count: int, index: int) -> Iterator[Piece]:
    for start, size in sections(arg, length):
        offset, taken = chunk(size, count, index)
        yield start + offset, taken


_PIECES = {"U": _uneven, "B": _blocks, "I": _interleaved}


def sections(arg: object, length: int) -> Iterator[Piece]:
    """The sections of an interleaved dim: of the sizes given, or as ``torch.chunk`` cuts into that many."""
    if isinstance(arg, int):
        yield from (chunk(length, arg, at) for at in range(arg))
        return
    assert isinstance(arg, tuple)
    start = 0
    for size in arg:
        yield start, size
        start += size


def fits(term: Term, length: int) -> str:
    """Why ``term`` cannot cut a stretch of ``length``, or ``""`` when it can."""
    if term.kind == "I" and isinstance(term.arg, int) and term.arg > MAX_SECTIONS:
        return f"more than {MAX_SECTIONS} sections"
    if term.kind == "B":
        assert isinstance(term.arg, tuple)
        if term.arg[1] and length > term.arg[0] * MAX_PIECES:
            return f"more than {MAX_PIECES} blocks of {term.arg[0]}"
    if term.kind == "U":
        assert isinstance(term.arg, tuple)
        if sum(term.arg) != length:
            return f"sizes {list(term.arg)} add up to {sum(term.arg)}, there are {length} to share out"
    if term.kind == "I" and isinstance(term.arg, tuple) and sum(term.arg) != length:
        return f"sections {list(term.arg)} add up to {sum(term.arg)}, there are {length} to share out"
    return ""


def sizes(term: Term, length: int, count: int) -> set[int]:
    """The different local lengths that the ranks along the axis get from a stretch of ``length``."""
    if term.kind == "S":
        step = -(-length // count)
        if step == 0:
            return {0}
        full = length // step
        found = {step} if full else set()
        if full < count:
            found.add(length - full * step)
            if full + 1 < count:
                found.add(0)
        return found
    return {sum(size for _, size in pieces(term, length, count, index)) for index in range(count)}


def compose(outer: list[Piece], inner: list[Piece]) -> list[Piece]:
    """Pieces of pieces: ``inner`` counts along the concatenation of ``outer``; the answer counts along the dim."""
    if len(outer) == 1:
        start = outer[0][0]
        return [(start + offset, size) for offset, size in inner]
    result: list[Piece] = []
    for offset, size in inner:
        position = 0
        for start, length in outer:
            begin, end = max(offset, position), min(offset + size, position + length)
            if begin < end:
                result.append((start + begin - position, end - begin))
            position += length
    return result


def merge(found: list[Piece]) -> list[Piece]:
    """Join pieces that follow each other both along the dim and in the local tensor."""
    merged: list[Piece] = []
    for offset, size in found:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged
