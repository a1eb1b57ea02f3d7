"""Who moves what: the part of a plan that one rank carries out, found without looking at other ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING, NamedTuple

from shard_reshard.assign import fetched, moves, num_shares
from shard_reshard.bound import Cell, Index, new_tuple
from shard_reshard.copies import Copy, cut_cell, make_copy, merge_copies

if TYPE_CHECKING:
    from shard_reshard.plan import ReshardPlan


class OwnPart(NamedTuple):
    """What one rank does in one stage of a plan."""

    sends: Mapping[int, tuple[Copy, ...]]  # by receiving rank, ascending; without the rank itself
    receives: Mapping[int, tuple[Copy, ...]]  # by sending rank, ascending; without the rank itself
    own: tuple[Copy, ...]  # copies that stay on the rank


def plan_own_part(plan: ReshardPlan, rank: int) -> tuple[OwnPart, ...]:
    """What ``rank`` does, one entry for each stage."""
    arriving, leaving = copies_of(plan, rank, plan.relays)
    parts = []
    for stage in range(plan.stages):
        here = [copy for copy in arriving if copy.stage == stage]
        own = _ordered(plan, [copy for copy in here if copy.src_rank == rank])
        receives = _by_peer(plan, [copy for copy in here if copy.src_rank != rank], attrgetter("src_rank"))
        sends = _by_peer(plan, [copy for copy in leaving if copy.stage == stage], attrgetter("dst_rank"))
        parts.append(OwnPart(sends, receives, own))
    return tuple(parts)


def copies_of(plan: ReshardPlan, rank: int, relay: bool) -> tuple[list[Copy], list[Copy]]:
    """All copies that end on ``rank``, and all that begin there and end elsewhere."""
    if plan.adjoint:
        forward_in, forward_out = copies_of(plan.transpose(), rank, relay=False)
        turned_in = [turned(copy) for copy in forward_out]
        turned_out = [turned(copy) for copy in forward_in if copy.src_rank != rank]
        own = [turned(copy) for copy in forward_in if copy.src_rank == rank]
        return own + turned_in, turned_out
    if plan.keeps_place:
        return [
            Copy(0, 0, p.start, sizes_of(p.start, p.stop), rank, rank, p.tensor, p.local_start, p.tensor, p.local_start)
            for p in plan.src.pieces(rank)
        ], []
    if not relay and plan.src.num_addends == plan.dst.num_addends == 1:
        return _direct_copies_of(plan, rank)
    arriving: list[Copy] = []
    leaving: list[Copy] = []
    for piece in plan.dst.pieces(rank):
        for whole in plan.dst.cross(piece.start, piece.stop):
            receivers = receivers_of(plan, whole)
            if rank in receivers:
                for src in plan.src.cross(piece.start, piece.stop):
                    dst = cut_cell(whole, src.start, src.stop)
                    for move in moves(src, dst, receivers, plan.itemsize, relay, rank):
                        if move.dst_rank == rank:
                            arriving.append(make_copy(move, src, dst))
                        elif move.stage == 1:
                            leaving.append(make_copy(move, src, dst))
    for piece in plan.src.pieces(rank):
        for whole in plan.src.cross(piece.start, piece.stop):
            for dst in plan.dst.cross(piece.start, piece.stop):
                src = cut_cell(whole, dst.start, dst.stop)
                for move in moves(src, dst, receivers_of(plan, dst), plan.itemsize, relay, rank):
                    if move.src_rank == rank and move.dst_rank != rank and move.stage == 0:
                        leaving.append(make_copy(move, src, dst))
    return arriving, leaving


def _direct_copies_of(plan: ReshardPlan, rank: int) -> tuple[list[Copy], list[Copy]]:
    """The same where values go straight from a holder to who needs them: the case of large worlds, kept lean."""
    arriving: list[Copy] = []
    leaving: list[Copy] = []
    for start, stop, tensor, local_start in plan.dst.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        for low, high, there, (holders,), tensors in plan.src.cross(start, stop):
            sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
            sender = holders[0]
            if len(holders) > 1:
                if rank not in holders and num_shares(holders, sizes, plan.itemsize) > 1:
                    src = Cell(low, high, there, (holders,), tensors)
                    dst = Cell(low, high, here, ((rank,),), {rank: tensor})
                    arriving += [make_copy(move, src, dst) for move in fetched(holders, rank, sizes, plan.itemsize)]
                    continue
                sender = rank if rank in holders else holders[rank % len(holders)]
            number = 0 if tensors is None else tensors[sender]
            arriving.append(new_tuple(Copy, (0, 0, low, sizes, sender, rank, number, there, tensor, here)))
    for start, stop, tensor, local_start in plan.src.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        (holders,) = next(plan.src.cross(start, stop)).holders
        count, holding = len(holders), frozenset(holders)
        for low, high, there, (receivers,), tensors in plan.dst.cross(start, stop):
            sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
            shared = count > 1 and num_shares(holders, sizes, plan.itemsize) > 1
            for receiver in receivers:
                if receiver in holding:
                    continue
                if shared:
                    src = Cell(low, high, here, (holders,), {rank: tensor})
                    dst = Cell(low, high, there, (receivers,), tensors)
                    parts = fetched(holders, receiver, sizes, plan.itemsize)
                    leaving += [make_copy(move, src, dst) for move in parts if move.src_rank == rank]
                elif count == 1 or holders[receiver % count] == rank:
                    number = 0 if tensors is None else tensors[receiver]
                    leaving.append(new_tuple(Copy, (0, 0, low, sizes, rank, receiver, tensor, here, number, there)))
    return arriving, leaving


def _between(plan: ReshardPlan, src: Cell, dst: Cell, receivers: tuple[int, ...], relay: bool) -> Iterator[Copy]:
    """The copies of the common box of two cells, given cut to it."""
    for move in moves(src, dst, receivers, plan.itemsize, relay):
        yield make_copy(move, src, dst)


def receivers_of(plan: ReshardPlan, cell: Cell) -> tuple[int, ...]:
    """Who gets the value of a destination cell: of a pending sum only the first addend, all others are filled."""
    if len(cell.holders) == 1 or plan.fill(cell.holders[0][0]) is not None:
        return cell.holders[0]
    return tuple(rank for ranks in cell.holders for rank in ranks)


def _by_peer(plan: ReshardPlan, copies: list[Copy], peer: Callable[[Copy], int]) -> dict[int, tuple[Copy, ...]]:
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        rank = peer(copy)
        if rank in found:
            found[rank].append(copy)
        else:
            found[rank] = [copy]
    return {rank: _ordered(plan, found[rank]) for rank in sorted(found)}


def _ordered(plan: ReshardPlan, copies: list[Copy]) -> tuple[Copy, ...]:
    if len(copies) < 2:
        return tuple(copies)
    # Addends of one region have to keep one shape, so copies that are reduced stay as they are.
    return tuple(sorted(copies) if plan.reduce_op is not None else merge_copies(copies))


def all_copies(plan: ReshardPlan, relay: bool) -> Iterator[Copy]:
    """Every copy between all ranks."""
    if plan.keeps_place:
        for rank in plan.src.ranks:
            yield from copies_of(plan, rank, relay)[0]
        return
    for src, dst in crossings(plan):
        yield from _between(plan, src, dst, receivers_of(plan, dst), relay)


def crossings(plan: ReshardPlan) -> Iterator[tuple[Cell, Cell]]:
    """Every box that a source cell and a destination cell have in common, as part of each."""
    for whole in plan.src.cells():
        for dst in plan.dst.cross(whole.start, whole.stop):
            yield cut_cell(whole, dst.start, dst.stop), dst


def turned(copy: Copy) -> Copy:
    """The copy the other way round; the addend becomes the rank it comes from, which fixes the order of sums."""
    return copy._replace(
        addend=copy.dst_rank,
        src_rank=copy.dst_rank,
        dst_rank=copy.src_rank,
        src_tensor=copy.dst_tensor,
        src_start=copy.dst_start,
        dst_tensor=copy.src_tensor,
        dst_start=copy.src_start,
    )


def sizes_of(start: Index, stop: Index) -> Index:
    return tuple(b - a for a, b in zip(start, stop, strict=True))
