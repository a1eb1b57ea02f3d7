"""Schedules: sends and receives of one rank, derived without loops over other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from operator import add, attrgetter, sub
from typing import NamedTuple

from shard_reshard.layout.shard_map import Cell, Index, new_tuple
from shard_reshard.plan.plan import SMALLEST_PART_BYTES, Plan


class Copy(NamedTuple):
    """One rectangle on its way from one rank to another (or on one rank).

    The order of the fields is the sort order of copies between one pair of ranks.
    """

    stage: int  # 0: out of source tensors; 1: out of destination tensors, relayed to other replicas
    partial_index: int
    start: Index  # in the global tensor
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
    """A share of the common box of a source and a destination cell, with both ranks."""

    stage: int
    partial_index: int
    src_rank: int
    dst_rank: int
    offset: Index  # of the share in the common box
    sizes: Index


def cut_cell(cell: Cell, start: Index, stop: Index) -> Cell:
    """Clip ``cell`` to the box, which lies inside of it."""
    if cell.start == start and cell.stop == stop:
        return cell
    local = tuple([at + new - old for at, new, old in zip(cell.local_start, start, cell.start, strict=True)])
    return new_tuple(Cell, (start, stop, local, cell.owners, cell.tensors))


def make_copy(move: Move, src: Cell, dst: Cell) -> Copy:
    """Return the copy of ``move`` between two cells of one box."""
    stage, partial_index, src_rank, dst_rank, offset, sizes = move
    came_from = dst if stage else src  # a relay sends from its destination tensor
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
    """Join copies of one pair of ranks that are adjacent in all three tensors; sorted."""
    merged = sorted(copies)
    if len(merged) < 2:
        return merged
    for dim in reversed(range(len(merged[0].start))):  # innermost first: rows, then planes
        rows: dict[tuple[object, ...], list[Copy]] = {}
        for copy in merged:
            rest = (copy.start[:dim], copy.start[dim + 1 :], copy.sizes[:dim], copy.sizes[dim + 1 :])
            rows.setdefault((copy.stage, copy.partial_index, copy.src_tensor, copy.dst_tensor, *rest), []).append(copy)
        if len(rows) == len(merged):
            continue
        merged = []
        for row in rows.values():  # copies that differ along `dim` only
            row.sort(key=lambda copy: copy.start[dim])  # called at once
            head = row[0]
            for copy in row[1:]:
                size = head.sizes[dim]
                places = (copy.start, head.start), (copy.src_start, head.src_start), (copy.dst_start, head.dst_start)
                if all(at == (*before[:dim], before[dim] + size, *before[dim + 1 :]) for at, before in places):
                    head = head._replace(sizes=(*head.sizes[:dim], size + copy.sizes[dim], *head.sizes[dim + 1 :]))
                else:
                    merged.append(head)
                    head = copy
            merged.append(head)
    return sorted(merged)


def split_box(sizes: Index, count: int) -> list[tuple[Index, Index]]:
    """Split a box into up to ``count`` shares of nearly equal size: (offset, sizes) each.

    Splits the outermost dim that is long enough, so that the shares stay as contiguous as the box.
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


class RankSchedule(NamedTuple):
    """Sends and receives of one rank in one stage of a plan."""

    sends: Mapping[int, tuple[Copy, ...]]  # by receiving rank, ascending; without this rank
    receives: Mapping[int, tuple[Copy, ...]]  # by sending rank, ascending; without this rank
    own: tuple[Copy, ...]  # local copies


def rank_schedule(plan: Plan, rank: int) -> tuple[RankSchedule, ...]:
    """Return sends, receives and local copies of ``rank`` by stage, from its own boxes."""
    cache: dict[int, tuple[RankSchedule, ...]] = plan.__dict__.setdefault("_schedules", {})
    if rank not in cache:
        if len(cache) >= 4:  # a process uses one rank, simulations use all
            cache.pop(next(iter(cache)))
        arriving, leaving = copies_of(plan, rank, plan.uses_scatter_allgather)
        parts = []
        for stage in range(2 if plan.uses_scatter_allgather else 1):
            here = _by_peer(plan, [copy for copy in arriving if copy.stage == stage], attrgetter("src_rank"))
            sends = _by_peer(plan, [copy for copy in leaving if copy.stage == stage], attrgetter("dst_rank"))
            own = here.pop(rank, ())
            parts.append(RankSchedule(sends, here, own))
        cache[rank] = tuple(parts)
    return cache[rank]


def all_ranks_copies(plan: Plan) -> Iterator[Copy]:
    """Every copy between all ranks, those that stay on their rank included: for pictures and proofs."""
    for rank in plan.dst.ranks:
        yield from copies_of(plan, rank, plan.uses_scatter_allgather)[0]


def is_local(plan: Plan) -> bool:
    """Return True if no rank sends anything."""
    if plan.adjoint:
        return is_local(plan.transpose())
    if plan.is_identity or plan.src.num_partials > 1:
        return plan.is_identity
    cached: bool | None = plan.__dict__.get("_is_local")
    if cached is None:
        cached = plan.__dict__["_is_local"] = True
        for rank in plan.dst.ranks:
            held = plan.src.pieces(rank)
            for box in plan.dst.pieces(rank):
                common = 0  # elements held already
                for other in held:
                    low, high = map(max, box.start, other.start), map(min, box.stop, other.stop)
                    common += prod(max(0, b - a) for a, b in zip(low, high, strict=True))
                lacks = common < prod(map(sub, box.stop, box.start))
                if lacks and rank in receivers_of(plan, next(plan.dst.cross(box.start, box.stop))):
                    plan.__dict__["_is_local"] = False
                    return False
    return cached


def copies_of(plan: Plan, rank: int, relay: bool) -> tuple[list[Copy], list[Copy]]:
    """Return all copies that end on ``rank``, and all from it to other ranks."""
    if plan.adjoint:
        forward_in, forward_out = copies_of(plan.transpose(), rank, relay=False)
        turned_in = [turned(copy) for copy in forward_out]
        turned_out = [turned(copy) for copy in forward_in if copy.src_rank != rank]
        own = [turned(copy) for copy in forward_in if copy.src_rank == rank]
        return own + turned_in, turned_out
    if plan.is_identity:
        return [
            Copy(0, 0, start, tuple(map(sub, stop, start)), rank, rank, tensor, local, tensor, local)
            for start, stop, tensor, local in plan.src.pieces(rank)
        ], []
    if not relay and plan.src.num_partials == plan.dst.num_partials == 1:
        return _direct_copies_of(plan, rank)
    arriving: list[Copy] = []
    leaving: list[Copy] = []
    for box in plan.dst.pieces(rank):
        for cell in plan.dst.cross(box.start, box.stop):
            receivers = receivers_of(plan, cell)
            if rank in receivers:
                for src in plan.src.cross(box.start, box.stop):
                    dst = cut_cell(cell, src.start, src.stop)
                    for move in moves(src, dst, receivers, plan.itemsize, relay, rank):
                        if move.dst_rank == rank:
                            arriving.append(make_copy(move, src, dst))
                        elif move.stage == 1:
                            leaving.append(make_copy(move, src, dst))
    for box in plan.src.pieces(rank):
        for cell in plan.src.cross(box.start, box.stop):
            for dst in plan.dst.cross(box.start, box.stop):
                src = cut_cell(cell, dst.start, dst.stop)
                for move in moves(src, dst, receivers_of(plan, dst), plan.itemsize, relay, rank):
                    if move.src_rank == rank and move.dst_rank != rank and move.stage == 0:
                        leaving.append(make_copy(move, src, dst))
    return arriving, leaving


def _direct_copies_of(plan: Plan, rank: int) -> tuple[list[Copy], list[Copy]]:
    """Same for direct moves without partial values, the lean case of large worlds."""
    arriving: list[Copy] = []
    leaving: list[Copy] = []
    for start, stop, tensor, local_start in plan.dst.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        for low, high, there, (owners,), tensors in plan.src.cross(start, stop):
            sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
            sender = owners[0]  # both ends have to choose alike
            if len(owners) > 1:
                if rank not in owners and num_shares(owners, sizes, plan.itemsize) > 1:
                    src = Cell(low, high, there, (owners,), tensors)
                    dst = Cell(low, high, here, ((rank,),), {rank: tensor})
                    arriving += [make_copy(move, src, dst) for move in fetch_moves(owners, rank, sizes, plan.itemsize)]
                    continue
                sender = rank if rank in owners else owners[rank % len(owners)]
            number = 0 if tensors is None else tensors[sender]
            arriving.append(new_tuple(Copy, (0, 0, low, sizes, sender, rank, number, there, tensor, here)))
    for start, stop, tensor, local_start in plan.src.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        (owners,) = next(plan.src.cross(start, stop)).owners
        count, holding = len(owners), frozenset(owners)
        for low, high, there, (receivers,), tensors in plan.dst.cross(start, stop):
            sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
            shared = count > 1 and num_shares(owners, sizes, plan.itemsize) > 1
            for receiver in receivers:
                if receiver in holding:
                    continue
                if shared:
                    src = Cell(low, high, here, (owners,), {rank: tensor})
                    dst = Cell(low, high, there, (receivers,), tensors)
                    parts = fetch_moves(owners, receiver, sizes, plan.itemsize)
                    leaving += [make_copy(move, src, dst) for move in parts if move.src_rank == rank]
                elif count == 1 or owners[receiver % count] == rank:
                    number = 0 if tensors is None else tensors[receiver]
                    leaving.append(new_tuple(Copy, (0, 0, low, sizes, rank, receiver, tensor, here, number, there)))
    return arriving, leaving


def receivers_of(plan: Plan, cell: Cell) -> tuple[int, ...]:
    """Return the ranks that receive a destination cell: of a pending sum only the first, others are filled."""
    if len(cell.owners) == 1 or plan.identity_value(cell.owners[0][0]) is not None:
        return cell.owners[0]
    return tuple(rank for ranks in cell.owners for rank in ranks)


def _by_peer(plan: Plan, copies: list[Copy], peer: Callable[[Copy], int]) -> dict[int, tuple[Copy, ...]]:
    by_peer: dict[int, list[Copy]] = {}
    for copy in copies:
        by_peer.setdefault(peer(copy), []).append(copy)
    # Addends of one region have to have one shape, so reduced copies stay unmerged.
    join = sorted if plan.reduce_op is not None else merge_copies
    return {rank: tuple(join(own) if len(own) > 1 else own) for rank, own in sorted(by_peer.items())}


def crossings(plan: Plan) -> Iterator[tuple[Cell, Cell]]:
    """Yield every common box of a source cell and a destination cell, clipped from each."""
    for cell in plan.src.cells():
        for dst in plan.dst.cross(cell.start, cell.stop):
            yield cut_cell(cell, dst.start, dst.stop), dst


def turned(copy: Copy) -> Copy:
    """Reverse a copy; its partial_index becomes the sending rank, which fixes the order of sums."""
    return copy._replace(
        partial_index=copy.dst_rank,
        src_rank=copy.dst_rank,
        dst_rank=copy.src_rank,
        src_tensor=copy.dst_tensor,
        src_start=copy.dst_start,
        dst_tensor=copy.src_tensor,
        dst_start=copy.src_start,
    )


def moves(src: Cell, dst: Cell, receivers: Sequence[int], itemsize: int, relay: bool, me: int) -> Iterator[Move]:
    """The moves from or to rank ``me`` that bring the common box of two cells (cut to it) to all ``receivers``."""
    sizes = tuple(map(sub, src.stop, src.start))
    if len(src.owners) > 1:
        yield from _reducing(src.owners, receivers, sizes, relay, me)
        return
    (owners,) = src.owners
    holding = owners if len(owners) < 8 else frozenset(owners)
    if me in receivers and me in holding:
        yield Move(0, 0, me, me, (0,) * len(sizes), sizes)
    missing = [rank for rank in receivers if rank not in holding]
    if relay and len(missing) > 1:
        yield from _relayed(owners, missing, sizes, me)
    elif me in holding:
        for rank in missing:
            yield from (move for move in fetch_moves(owners, rank, sizes, itemsize) if move.src_rank == me)
    elif me in receivers:
        yield from fetch_moves(owners, me, sizes, itemsize)


def num_shares(owners: Sequence[int], sizes: Index, itemsize: int) -> int:
    """Return the number of owners that each send a part of a box; 0 and 1 mean that one owner sends all of it."""
    return min(len(owners), prod(sizes) * itemsize // SMALLEST_PART_BYTES)


def fetch_moves(owners: Sequence[int], rank: int, sizes: Index, itemsize: int) -> Iterator[Move]:
    """Yield a box's moves to ``rank``: a large one in shares from ``owners``, a small one from one."""
    shares = num_shares(owners, sizes, itemsize)
    if shares <= 1:
        yield Move(0, 0, owners[rank % len(owners)], rank, (0,) * len(sizes), sizes)
        return
    for number, (offset, part) in enumerate(split_box(sizes, shares)):
        yield Move(0, 0, owners[(rank + number) % len(owners)], rank, offset, part)


def _relayed(owners: Sequence[int], missing: list[int], sizes: Index, me: int) -> Iterator[Move]:
    """Each missing rank fetches one part, then they pass the parts on among themselves."""
    for number, (offset, part) in enumerate(split_box(sizes, len(missing))):
        first, holder = missing[number], owners[number % len(owners)]
        if me in (first, holder):
            yield Move(0, 0, holder, first, offset, part)
        yield from _passed_on(first, missing, offset, part, me)


def _passed_on(first: int, receivers: Sequence[int], offset: Index, part: Index, me: int) -> Iterator[Move]:
    """One part from the rank that has it to all others."""
    for rank in receivers if me == first else (me,) if me in receivers else ():
        if rank != first:
            yield Move(1, 0, first, rank, offset, part)


def _reducing(
    owners: Sequence[Sequence[int]], receivers: Sequence[int], sizes: Index, relay: bool, me: int
) -> Iterator[Move]:
    """Send every addend to a reducer: each receiver, or with ``relay`` one receiver for each share."""
    if not relay or len(receivers) == 1:
        for rank in receivers:
            yield from _addends(owners, rank, (0,) * len(sizes), sizes, me)
        return
    contributing = {rank for ranks in owners for rank in ranks}  # their own addend is local
    reducers = [rank for rank in receivers if rank in contributing] or list(receivers)  # fewer transfers
    for number, (offset, part) in enumerate(split_box(sizes, len(reducers))):
        yield from _addends(owners, reducers[number], offset, part, me)
        yield from _passed_on(reducers[number], receivers, offset, part, me)


def _addends(owners: Sequence[Sequence[int]], rank: int, offset: Index, sizes: Index, me: int) -> Iterator[Move]:
    """All addends to one rank, each from one holder: they have to arrive in one shape to be reduced."""
    for partial_index, ranks in enumerate(owners):
        source = rank if rank in ranks else ranks[rank % len(ranks)]
        if me in (rank, source):
            yield Move(0, partial_index, source, rank, offset, sizes)
