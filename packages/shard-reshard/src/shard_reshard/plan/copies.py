"""Copies: the rectangles that a plan moves, and the order that both ends agree on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from operator import add
from typing import NamedTuple

from shard_reshard.layout.base import Cell, Index, new_tuple


class Copy(NamedTuple):
    """One rectangle on its way from one rank to another (or staying on one).

    The fields that order copies come first: copies of one pair of ranks travel sorted.
    """

    stage: int  # 0: out of source tensors; 1: out of a rank's destination tensors, relayed to other replicas
    partial_index: int
    start: Index  # where in the global tensor
    sizes: Index
    src_rank: int
    dst_rank: int
    src_tensor: int
    src_start: Index
    dst_tensor: int
    dst_start: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


class Move(NamedTuple):
    """Part of the common box of a source and a destination cell, and between whom it moves."""

    stage: int
    partial_index: int
    src_rank: int
    dst_rank: int
    offset: Index  # of the part in the common box
    sizes: Index


def cut_cell(cell: Cell, start: Index, stop: Index) -> Cell:
    """The part of ``cell`` inside of the box, which lies in it completely."""
    if cell.start == start and cell.stop == stop:
        return cell
    local = tuple([at + new - old for at, new, old in zip(cell.local_start, start, cell.start, strict=True)])
    return new_tuple(Cell, (start, stop, local, cell.owners, cell.tensors))


def make_copy(move: Move, src: Cell, dst: Cell) -> Copy:
    """The copy that ``move`` is between two cells of one box."""
    stage, partial_index, src_rank, dst_rank, offset, sizes = move
    came_from = dst if stage else src
    start, src_start, dst_start = src.start, came_from.local_start, dst.local_start
    if any(offset):
        start = tuple(map(add, start, offset))
        src_start, dst_start = tuple(map(add, src_start, offset)), tuple(map(add, dst_start, offset))
    src_tensor = 0 if came_from.tensors is None else came_from.tensors[src_rank]
    dst_tensor = 0 if dst.tensors is None else dst.tensors[dst_rank]
    return new_tuple(
        Copy, (stage, partial_index, start, sizes, src_rank, dst_rank, src_tensor, src_start, dst_tensor, dst_start)
    )


def merge_copies(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies of one pair of ranks that are neighbours in the global tensor and in both local ones; sorted."""
    found = sorted(copies)
    if len(found) < 2:
        return found
    for dim in reversed(range(len(found[0].start))):
        rows: dict[tuple[object, ...], list[Copy]] = {}
        for copy in found:
            rest = (copy.start[:dim], copy.start[dim + 1 :], copy.sizes[:dim], copy.sizes[dim + 1 :])
            rows.setdefault((copy.stage, copy.partial_index, copy.src_tensor, copy.dst_tensor, *rest), []).append(copy)
        if len(rows) < len(found):
            found = [joined for row in rows.values() for joined in _join_row(row, dim)]
    return sorted(found)


def _join_row(row: list[Copy], dim: int) -> Iterator[Copy]:
    """Join copies that differ along ``dim`` only, in the order of their starts."""
    row.sort(key=lambda copy: copy.start[dim])
    head = row[0]
    for copy in row[1:]:
        size = head.sizes[dim]
        places = (copy.start, head.start), (copy.src_start, head.src_start), (copy.dst_start, head.dst_start)
        if all(at == (*before[:dim], before[dim] + size, *before[dim + 1 :]) for at, before in places):
            head = head._replace(sizes=(*head.sizes[:dim], size + copy.sizes[dim], *head.sizes[dim + 1 :]))
        else:
            yield head
            head = copy
    yield head


def split_box(sizes: Index, count: int) -> list[tuple[Index, Index]]:
    """Cut a box into up to ``count`` parts of nearly equal size: (offset, sizes) each.

    Along the outermost dim that is long enough, so that the parts stay as contiguous as the box is.
    """
    zero = (0,) * len(sizes)
    if count == 1 or not sizes:
        return [(zero, sizes)]
    dim = next((d for d, size in enumerate(sizes) if size >= count), max(range(len(sizes)), key=sizes.__getitem__))
    count = min(count, sizes[dim])
    marks = [at * sizes[dim] // count for at in range(count + 1)]
    return [
        ((*zero[:dim], low, *zero[dim + 1 :]), (*sizes[:dim], high - low, *sizes[dim + 1 :]))
        for low, high in pairwise(marks)
    ]
