"""The plan of one tensor as a value, its validation, and each rank's schedule.

A plan says which rank sends which box to which rank. It is pure, and the same on every rank. A rank derives its own
schedule without loops over other ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from operator import add, attrgetter, sub
from typing import NamedTuple, Self

from shard_reshard._shared.dtypes import FLOATING
from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.shard_map import ITEMSIZES, Cell, Index, ShardMap, new_tuple

FORMAT = 1

# Smaller shares are not worth a message: boxes are split among owners in shares of at least this size.
SMALLEST_PART_BYTES = 16 * 1024


@dataclass(frozen=True)
class Plan:
    """Plan of one tensor from one layout to another, as a value.

    Attributes:
        shape: Shape of the global tensor.
        dtype: Name of the source's dtype, for example ``"float32"``.
        out_dtype: Name of the destination's dtype.
        src: Layout of the source.
        dst: Layout of the destination.
        max_workspace_bytes: The most bytes of temporary buffers a rank may use, or None.
        adjoint: True for a plan of gradients: values that arrive at one place from several ranks are added up.
        hosts: The host of each rank, numbered from 0, or None. Senders on the receiver's host are preferred, and a host
            whose ranks all lack a value gets one copy of it.
    """

    shape: Index
    dtype: str
    out_dtype: str
    src: ShardMap
    dst: ShardMap
    max_workspace_bytes: int | None = None
    adjoint: bool = False
    hosts: tuple[int, ...] | None = None

    # ---- identity ---------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hex digest of the full content; equal plans have equal digests on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, byte-stable."""
        data = {
            "format": FORMAT,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "out_dtype": self.out_dtype,
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "max_workspace_bytes": self.max_workspace_bytes,
            "adjoint": self.adjoint,
        }
        if self.hosts is not None:
            data["hosts"] = list(self.hosts)
        return json.dumps(data, separators=(",", ":"), sort_keys=True)

    # ---- derived ----------------------------------------------------------------------------------------------

    @cached_property
    def world_size(self) -> int:
        """Number of ranks needed by the plan: its largest rank plus one."""
        return max(max(side.ranks, default=-1) for side in (self.src, self.dst)) + 1

    @cached_property
    def is_identity(self) -> bool:
        """True if source and destination are one layout: every rank copies locally."""
        return self.src == self.dst

    @cached_property
    def wire_dtype(self) -> str:
        """Name of the dtype in transfers. The smaller of both; the source's if values are still to be reduced."""
        if self.reduce_op is not None or ITEMSIZES[self.dtype] < ITEMSIZES[self.out_dtype]:
            return self.dtype
        return self.out_dtype

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element in a transfer."""
        return ITEMSIZES[self.wire_dtype]

    @cached_property
    def reduce_op(self) -> str | None:
        """Reduction on the way: "sum", "min", "max" or "product"; None for none."""
        if self.adjoint:
            return "sum"
        if self.is_identity or self.src.num_partials == 1:
            return None
        op = self.src.reduce_ops[0]
        return "sum" if op == "avg" else op  # summed, then divided once

    @cached_property
    def divisor(self) -> int:
        """Divisor of a reduced value: the number of averaged ranks."""
        return 1 if self.is_identity else (self.dst if self.adjoint else self.src).averaged

    @cached_property
    def uses_scatter_allgather(self) -> bool:
        """True if replicated destinations are filled by scatter and all-gather: over all replicas where that loads the
        busiest rank less (see `_busiest`), else on each host that lacks the data on several ranks.
        """
        if self.is_identity or self.adjoint or self.dst.num_partials > 1:
            return False
        if self.dst.max_replicas == 1 or 0 in self.shape:  # nothing to relay
            return False
        if self.src.num_partials > 1 and self.dtype != self.out_dtype:
            return False  # relayed values would be rounded to the wire dtype: replicas would differ
        if self.hosts is not None and self.src.num_partials == 1:
            return any(
                next(_relay_groups(src.owners[0], receivers_of(self, dst), True, self.hosts), None)
                for src, dst in crossings(self)
            )
        direct, relayed = _busiest(self)
        return relayed + SMALLEST_PART_BYTES <= direct  # a second exchange has to pay off

    def identity_value(self, rank: int) -> int | None:
        """Return the fill value of a partial destination without a contribution. 0 for a sum, 1 for a product."""
        if self.adjoint:
            return 0
        if self.is_identity or self.dst.num_partials == 1 or not set(self.dst.reduce_ops) & {"sum", "product"}:
            return None
        return 1 if self.dst.reduce_ops[0] == "product" else 0

    def transpose(self) -> Self:
        """Return the plan of the gradients: every copy reversed, arrivals added up.

        ``plan.transpose().transpose() == plan``.
        """
        dtypes, layouts = (self.out_dtype, self.dtype), (self.dst, self.src)
        return type(self)(self.shape, *dtypes, *layouts, self.max_workspace_bytes, not self.adjoint, self.hosts)


def group_problems(plans: Iterable[Plan], size: int) -> list[Problem]:
    """Report plans with ranks outside of a group of ``size`` ranks."""
    highest = max((plan.world_size for plan in plans), default=0)
    if highest <= size:
        return []
    return [
        Problem(
            "rank-outside-mesh",
            "group",
            found=f"a layout names rank {highest - 1}, the group has {size} ranks",
            hint="pass a larger group=",
        )
    ]


def _busiest(plan: Plan) -> tuple[int, int]:
    """Estimate the bytes of the busiest rank: directly, and with a relay among the replicas.

    Directly an owner sends its data to every replica (its share, if there are several owners), and a replica receives
    every partial value. With a relay an owner sends its data once, and a replica relays and receives its own.
    """
    replicas, owners, addends = plan.dst.max_replicas, plan.src.max_replicas, plan.src.num_partials
    has, gets = plan.src.largest * plan.itemsize, plan.dst.largest * plan.itemsize
    if addends > 1:
        direct = max(has * (replicas - 1), gets * (addends - 1))
        relayed = max(has, gets * addends // replicas) * (replicas - 1) // replicas + gets * (replicas - 1) // replicas
        return direct, relayed
    if plan.src.rank_set >= plan.dst.rank_set and owners >= replicas:
        return 0, 0  # mostly own copies
    return has * replicas // owners, has // owners + gets


_UNSIGNED = ("uint16", "uint32", "uint64")  # torch has no kernels to add or compare them


def _size(cell: Cell) -> int:
    return prod(map(sub, cell.stop, cell.start))


def check_plan(plan: Plan) -> None:
    """Raise everything that keeps a plan from being carried out."""
    problems: list[Problem] = []

    def add(code: str, name: str, found: str, hint: str) -> None:
        problems.append(Problem(code, name, found=found, hint=hint))

    ops = set() if plan.is_identity else set(plan.src.reduce_ops)
    pending = set() if plan.is_identity else set(plan.dst.reduce_ops)
    wanted = plan.dst.cells() if plan.src.holes else ()
    if any(sum(map(_size, plan.src.cross(cell.start, cell.stop))) < _size(cell) for cell in wanted):
        add("boxes-incomplete", "src", "elements that no rank has", "only a destination may leave elements out")
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        add(
            "unsupported-dtype",
            "src",
            f"partial axes of {', '.join(sorted(ops))}",
            "reduce one axis after the other: redistribute to a layout that keeps one of them first",
        )
    # Found here, because a rank that finds it while it reduces leaves the others waiting.
    is_complex, is_unsigned = plan.dtype.startswith("complex"), plan.dtype in _UNSIGNED
    if (
        ("avg" in ops and plan.dtype not in FLOATING)
        or (ops and plan.dtype == "bool")
        or (is_unsigned and ops - {"product"})
        or (is_complex and ops & {"min", "max"})
    ):
        add(
            "unsupported-dtype",
            "src",
            f"{', '.join(sorted(ops))} of {plan.dtype}",
            "convert it before, to a dtype that torch can add and compare",
        )
    if len(pending) > 1 and pending & {"sum", "product"}:
        add(
            "unsupported-dtype",
            "dst",
            f"partial axes of {', '.join(sorted(pending))}",
            "make all partial axes of the destination one op",
        )
    if is_complex and not plan.out_dtype.startswith("complex"):
        add("dtype-mismatch", "dtype", f"{plan.dtype} to {plan.out_dtype}", "take the real part before")
    limit = plan.max_workspace_bytes
    if limit is not None and limit < 1:
        add("invalid-argument", "max_workspace_bytes", f"max_workspace_bytes={limit}", "at least one byte, or None")
    if problems:
        raise PlanError(problems)


# ---- schedules -------------------------------------------------------------------------------------------------


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
    """A share of the common box of a source and a destination cell."""

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


@lru_cache(maxsize=1024)  # a process uses its own rank of the plans of a few models
def rank_schedule(plan: Plan, rank: int) -> tuple[RankSchedule, ...]:
    """Return sends, receives and local copies of ``rank`` by stage, from its own boxes."""
    arriving, leaving = copies_of(plan, rank, plan.uses_scatter_allgather)
    parts = []
    for stage in range(2 if plan.uses_scatter_allgather else 1):
        receives = _by_peer(plan, [copy for copy in arriving if copy.stage == stage], attrgetter("src_rank"))
        sends = _by_peer(plan, [copy for copy in leaving if copy.stage == stage], attrgetter("dst_rank"))
        own = receives.pop(rank, ())
        parts.append(RankSchedule(sends, receives, own))
    return tuple(parts)


def all_ranks_copies(plan: Plan) -> Iterator[Copy]:
    """Every copy between all ranks, with those that stay on their rank."""
    for rank in plan.dst.ranks:
        yield from copies_of(plan, rank, plan.uses_scatter_allgather)[0]


@lru_cache(maxsize=4096)
def is_local(plan: Plan) -> bool:
    """Return True if no rank sends anything."""
    if plan.adjoint:
        return is_local(plan.transpose())
    if plan.is_identity or plan.src.num_partials > 1:
        return plan.is_identity
    for rank in plan.dst.ranks:
        held = plan.src.pieces(rank)
        for box in plan.dst.pieces(rank):
            common = 0  # elements held already
            for other in held:
                low, high = map(max, box.start, other.start), map(min, box.stop, other.stop)
                common += prod(max(0, b - a) for a, b in zip(low, high, strict=True))
            lacks = common < prod(map(sub, box.stop, box.start))
            if lacks and rank in receivers_of(plan, next(plan.dst.cross(box.start, box.stop))):
                return False
    return True


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
    arriving: list[Copy] = []
    leaving: list[Copy] = []
    # Without addends, relays and hosts most boxes have one sender: the lean case of large worlds makes no moves for it.
    itemsize, hosts = plan.itemsize, plan.hosts
    direct = not relay and hosts is None and plan.src.num_partials == plan.dst.num_partials == 1
    for start, stop, tensor, local_start in plan.dst.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        for cell in plan.dst.cross(start, stop):
            receivers = receivers_of(plan, cell)
            for src in plan.src.cross(start, stop) if rank in receivers else ():
                low, high, there, addends, tensors = src
                owners, sizes = addends[0], tuple(map(sub, high, low))
                alone = len(owners) == 1
                if direct and (alone or rank in owners or num_shares(owners, sizes, itemsize) < 2):
                    sender = rank if rank in owners else owners[0] if alone else turn(owners, rank)
                    here = tuple(map(add, low, shift))
                    number = 0 if tensors is None else tensors[sender]
                    arriving.append(new_tuple(Copy, (0, 0, low, sizes, sender, rank, number, there, tensor, here)))
                    continue
                dst = cut_cell(cell, low, high)
                for move in moves(src, dst, receivers, itemsize, relay, rank, hosts):
                    if move.dst_rank == rank:
                        arriving.append(make_copy(move, src, dst))
                    elif move.stage == 1:
                        leaving.append(make_copy(move, src, dst))
    for start, stop, tensor, local_start in plan.src.pieces(rank):
        shift = tuple(map(sub, local_start, start))
        for cell in plan.src.cross(start, stop):
            owners, holding, count = cell.owners[0], frozenset(cell.owners[0]), len(cell.owners[0])
            for dst in plan.dst.cross(start, stop):
                low, high, there, addends, tensors = dst
                receivers = addends[0] if direct else receivers_of(plan, dst)
                if direct and holding.issuperset(receivers):
                    continue
                sizes = tuple(map(sub, high, low))
                if direct and (count == 1 or num_shares(owners, sizes, itemsize) < 2):
                    here = tuple(map(add, low, shift))
                    for to in receivers:
                        if to not in holding and (count == 1 or turn(owners, to) == rank):
                            number = 0 if tensors is None else tensors[to]
                            leaving.append(new_tuple(Copy, (0, 0, low, sizes, rank, to, tensor, here, number, there)))
                    continue
                src = cut_cell(cell, low, high)
                for move in moves(src, dst, receivers, itemsize, relay, rank, hosts):
                    if move.src_rank == rank and move.dst_rank != rank and move.stage == 0:
                        leaving.append(make_copy(move, src, dst))
    return arriving, leaving


def receivers_of(plan: Plan, cell: Cell) -> tuple[int, ...]:
    """Return the ranks that receive a destination cell. Of a pending sum only the first; others are filled."""
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


Hosts = Sequence[int] | None


def moves(
    src: Cell, dst: Cell, receivers: Sequence[int], itemsize: int, relay: bool, me: int, hosts: Hosts = None
) -> Iterator[Move]:
    """Yield the moves of rank ``me`` for two cells, both cut to their common box."""
    sizes = tuple(map(sub, src.stop, src.start))
    if len(src.owners) > 1:
        yield from _reducing(src.owners, receivers, sizes, relay, me, hosts)
        return
    (owners,) = src.owners
    holding = owners if len(owners) < 8 else frozenset(owners)
    if me in receivers and me in holding:
        yield Move(0, 0, me, me, (0,) * len(sizes), sizes)
    relayed: set[int] = set()
    for group in _relay_groups(owners, receivers, relay, hosts) if relay else ():
        yield from _relayed(owners, group, sizes, me)
        relayed.update(group)
    # A sender looks at every receiver, a receiver at itself.
    for rank in receivers if me in holding else (me,) if me in receivers else ():
        if rank not in holding and rank not in relayed:
            yield from fetch_moves(owners, rank, sizes, itemsize, me, hosts)


def turn(owners: Sequence[int], rank: int) -> int:
    """Return the first of `senders` to a rank that has nothing itself: ranks take turns."""
    return owners[rank % len(owners)]


def num_shares(owners: Sequence[int], sizes: Index, itemsize: int) -> int:
    """Return how many owners send a share of a box; below 2 one sends all of it."""
    return min(len(owners), prod(sizes) * itemsize // SMALLEST_PART_BYTES)


def senders(
    owners: Sequence[int], rank: int, sizes: Index = (0,), itemsize: int = 1, hosts: Hosts = None
) -> Sequence[int]:
    """Return the ranks that send a box to ``rank``, in the order of their shares: the one rule for choosing senders.

    A rank that has the box itself, else one owner, or several for a large box; those on the rank's host if there are
    any. Different ranks begin with different owners.
    """
    if rank in owners:
        return (rank,)
    near = owners if hosts is None else [owner for owner in owners if hosts[owner] == hosts[rank]] or owners
    at, count = rank % len(near), max(1, num_shares(near, sizes, itemsize))
    return (*near[at : at + count], *near[: max(0, at + count - len(near))])


def fetch_moves(owners: Sequence[int], rank: int, sizes: Index, itemsize: int, me: int, hosts: Hosts) -> Iterator[Move]:
    """Yield a box's moves to ``rank``, from one owner or in shares from several: those of rank ``me``."""
    chosen = senders(owners, rank, sizes, itemsize, hosts)
    for sender, (offset, part) in zip(chosen, split_box(sizes, len(chosen)), strict=False):
        if me in (sender, rank):
            yield Move(0, 0, sender, rank, offset, part)


def _relay_groups(owners: Sequence[int], receivers: Sequence[int], relay: bool, hosts: Hosts) -> Iterator[list[int]]:
    """Yield the receivers that fetch shares of a box and pass them on to each other: two or more, on one host."""
    holding, by_host = frozenset(owners), dict[int, list[int]]()
    if not relay:
        return
    served = set() if hosts is None else {hosts[owner] for owner in owners}  # they fetch it on their host
    for rank in receivers:
        host = 0 if hosts is None else hosts[rank]
        if rank not in holding and host not in served:
            by_host.setdefault(host, []).append(rank)
    yield from (group for group in by_host.values() if len(group) > 1)


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
    owners: Sequence[Sequence[int]], receivers: Sequence[int], sizes: Index, relay: bool, me: int, hosts: Hosts
) -> Iterator[Move]:
    """Send every addend to the reducers: all receivers, or with ``relay`` one for each share."""
    if not relay or len(receivers) == 1:
        for rank in receivers:
            yield from _addends(owners, rank, (0,) * len(sizes), sizes, me, hosts)
        return
    contributing = {rank for ranks in owners for rank in ranks}  # their own addend is local
    reducers = [rank for rank in receivers if rank in contributing] or list(receivers)  # fewer transfers
    for number, (offset, part) in enumerate(split_box(sizes, len(reducers))):
        yield from _addends(owners, reducers[number], offset, part, me, hosts)
        yield from _passed_on(reducers[number], receivers, offset, part, me)


def _addends(
    owners: Sequence[Sequence[int]], rank: int, offset: Index, sizes: Index, me: int, hosts: Hosts
) -> Iterator[Move]:
    """All addends to one rank, each from one holder. They arrive in one shape, to be reduced."""
    for partial_index, ranks in enumerate(owners):
        (source,) = senders(ranks, rank, hosts=hosts)
        if me in (rank, source):
            yield Move(0, partial_index, source, rank, offset, sizes)
