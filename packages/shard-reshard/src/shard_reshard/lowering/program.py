"""Programs: the packing, exchanges and unpacking of one rank, in bytes; still pure.

A program executes one plan or several fused ones. Its steps are the collectives, equally many on every rank. Within
a step the bytes for one peer are contiguous: fused plans by decreasing element size (so that every segment is
aligned), the copies of a plan in one order on both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import add
from typing import NamedTuple

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.shard_map import ITEMSIZES, REDUCED_IN_FLOAT32, Index
from shard_reshard.plan.plan import Plan
from shard_reshard.plan.schedule import Copy, RankSchedule, all_ranks_copies, is_local, rank_schedule


def num_rounds(plan: Plan, stage: int, partial_index: int | None) -> int:
    """Return the number of rounds of a stage (or one addend of it); the same on every rank.

    Each message is split into that many shares of nearly equal size. Two rounds are in flight at a time, so a round's
    buffers, for sends and receives, may use half of the bound.

    Raises:
        PlanError: ``invalid-argument`` if even single elements exceed it.
    """
    assert plan.max_workspace_bytes is not None
    budget = plan.max_workspace_bytes // 2  # two rounds in flight
    rounds = 1
    for messages in _messages_by_rank(plan, stage, partial_index):
        total = sum(messages)
        # A round may hold one more element of each message than the average.
        room = budget // plan.itemsize - len(messages)
        if total > room + len(messages):
            if room < 1:
                least = 2 * (len(messages) + 1) * plan.itemsize
                raise PlanError(
                    Problem(
                        "invalid-argument",
                        "max_workspace_bytes",
                        found=f"{plan.max_workspace_bytes} bytes for {len(messages)} messages of a rank",
                        hint=f"allow at least {least} bytes; a megabyte or more keeps the number of rounds small",
                    )
                )
            rounds = max(rounds, -(-total // room))
    return rounds


def _messages_by_rank(plan: Plan, stage: int, partial_index: int | None) -> list[list[int]]:
    """Return the number of elements of each rank's messages in the stage."""
    key = ("messages", stage, partial_index)
    cache = plan.__dict__.setdefault("_messages", {})
    if key not in cache:
        pairs: dict[tuple[int, int], int] = {}
        for copy in all_ranks_copies(plan):
            chosen = copy.stage == stage and partial_index in (None, copy.partial_index)
            if chosen and copy.src_rank != copy.dst_rank:
                pair = copy.src_rank, copy.dst_rank
                pairs[pair] = pairs.get(pair, 0) + copy.numel
        by_rank: list[list[int]] = [[] for _ in range(plan.world_size)]
        for (src, dst), size in pairs.items():
            by_rank[src].append(size)
            by_rank[dst].append(size)
        cache[key] = by_rank
    found: list[list[int]] = cache[key]
    return found


def row_major_boxes(sizes: Index, begin: int, end: int) -> Iterator[tuple[Index, Index]]:
    """Yield the boxes of elements ``begin`` to ``end`` (row-major) of ``sizes``, in order."""
    if begin >= end:
        return
    if begin == 0 and end == prod(sizes):
        yield (0,) * len(sizes), sizes
        return
    inner = prod(sizes[1:])  # elements of a row
    first, last = begin // inner, (end - 1) // inner
    if inner == 1:
        yield (begin,) + (0,) * (len(sizes) - 1), (end - begin,) + (1,) * (len(sizes) - 1)
        return
    if first == last:
        for offset, part in row_major_boxes(sizes[1:], begin - first * inner, end - first * inner):
            yield (first, *offset), (1, *part)
        return
    if begin % inner:  # a partial first row
        for offset, part in row_major_boxes(sizes[1:], begin - first * inner, inner):
            yield (first, *offset), (1, *part)
        first += 1
    whole_end = end // inner
    if whole_end > first:
        yield (first,) + (0,) * (len(sizes) - 1), (whole_end - first, *sizes[1:])
    if end % inner:  # a partial last row
        for offset, part in row_major_boxes(sizes[1:], 0, end - whole_end * inner):
            yield (whole_end, *offset), (1, *part)


class Segment(NamedTuple):
    """A region of a local tensor and its bytes in a buffer."""

    plan: int  # index of the fused plan
    tensor: int  # index of the program's local tensor
    start: Index
    sizes: Index
    offset: int  # bytes from the start of the buffer
    num_bytes: int
    partial_index: int


class OwnCopy(NamedTuple):
    """A local copy on the rank."""

    plan: int
    src_tensor: int
    src_start: Index
    dst_tensor: int
    dst_start: Index
    sizes: Index
    partial_index: int


class Step(NamedTuple):
    """One collective and the copies around it."""

    relayed: bool  # sends from destination tensors
    exchanges: bool  # False if no rank sends: no collective
    send_splits: tuple[int, ...]  # bytes for each rank of the group; 0 for the rank itself
    receive_splits: tuple[int, ...]
    sends: tuple[Segment, ...]
    receives: tuple[Segment, ...]
    own: tuple[OwnCopy, ...]


@dataclass(frozen=True)
class Program:
    """All steps of one rank.

    Attributes:
        plans: The fused plans.
        rank: The rank in the group.
        world_size: Size of the group.
        src_shapes, dst_shapes: Shapes of the local tensors, those of all plans concatenated.
        src_base, dst_base: For each plan, the index of its first tensor in these lists; one more entry closes the last.
        steps: The collectives, in order.
    """

    plans: tuple[Plan, ...]
    rank: int
    world_size: int
    src_shapes: tuple[Index, ...]
    dst_shapes: tuple[Index, ...]
    src_base: tuple[int, ...]
    dst_base: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def overlaps(self) -> bool:
        """True if the next step is posted before a step is unpacked."""
        return any(plan.max_workspace_bytes is not None for plan in self.plans)

    @cached_property
    def accumulator_bytes(self) -> int:
        """Bytes of accumulators for reductions that cannot use the result."""
        return sum(
            ITEMSIZES[reduction_dtype(plan)]
            * sum(map(prod, self.dst_shapes[self.dst_base[at] : self.dst_base[at + 1]]))
            for at, plan in enumerate(self.plans)
            if accumulates_apart(plan)
        )


def accumulates_apart(plan: Plan) -> bool:
    """Return True if the result's dtype would round each step of a reduction."""
    return plan.reduce_op is not None and (plan.dtype in REDUCED_IN_FLOAT32 or plan.out_dtype != plan.dtype)


def reduction_dtype(plan: Plan) -> str:
    """Return the dtype of reductions: float32 for all smaller floating dtypes."""
    return "float32" if plan.dtype in REDUCED_IN_FLOAT32 else plan.dtype


def build_program(plans: Sequence[Plan], rank: int, world_size: int) -> Program:
    """Build the program of ``rank`` for ``plans``, fused into the same collectives."""
    plans = tuple(plans)
    src_shapes = [plan.src.local_shapes(rank) for plan in plans]
    dst_shapes = [plan.dst.local_shapes(rank) for plan in plans]
    src_base, dst_base = (tuple(accumulate(map(len, side), initial=0)) for side in (src_shapes, dst_shapes))
    builder = _Builder(plans, rank, world_size, src_base, dst_base)
    return Program(
        plans,
        rank,
        world_size,
        tuple(shape for shapes in src_shapes for shape in shapes),
        tuple(shape for shapes in dst_shapes for shape in shapes),
        src_base,
        dst_base,
        tuple(builder.steps()),
    )


@dataclass
class _Builder:
    """Build steps from this rank's schedules of fused plans."""

    plans: tuple[Plan, ...]
    rank: int
    world_size: int
    src_base: tuple[int, ...]
    dst_base: tuple[int, ...]

    def __post_init__(self) -> None:
        plans, rank = self.plans, self.rank
        self.order = sorted(range(len(plans)), key=lambda at: (-plans[at].itemsize, at))
        self.src_places = [plan.src.places(rank) for plan in plans]
        self.dst_places = [plan.dst.places(rank) for plan in plans]
        sizes = {plan.itemsize for plan in plans}
        self.padding = max(sizes) if len(sizes) > 1 else 1  # each message starts aligned

    def steps(self) -> Iterator[Step]:
        if len(self.plans) == 1 and self.plans[0].max_workspace_bytes is not None:
            yield from self._bounded(self.plans[0])
            return
        for stage in range(max(plan.stages for plan in self.plans)):
            parts = {
                at: rank_schedule(plan, self.rank)[stage] for at, plan in enumerate(self.plans) if stage < plan.stages
            }
            exchanges = any(not is_local(self.plans[at]) for at in parts)
            yield self._step(stage, parts, exchanges)

    def _bounded(self, plan: Plan) -> Iterator[Step]:
        """Yield steps with buffers, two steps at a time, within the plan's bound."""
        assert plan.max_workspace_bytes is not None
        for stage, part in enumerate(rank_schedule(plan, self.rank)):
            # One partial value after the other: the order of additions is that of the unbounded plan.
            addends = range(plan.src.num_partials) if plan.reduce_op and not plan.adjoint and stage == 0 else [None]
            for partial_index in addends:
                chosen = part if partial_index is None else _only(part, partial_index)
                if is_local(plan):
                    yield self._step(stage, {0: chosen}, exchanges=False)
                    continue
                rounds = num_rounds(plan, stage, partial_index)
                for number in range(rounds):
                    yield self._step(stage, {0: _round(chosen, number, rounds)}, exchanges=True)

    def _step(self, stage: int, parts: dict[int, RankSchedule], exchanges: bool) -> Step:
        send_base = self.dst_base if stage else self.src_base
        sends, send_splits = self._lay_out({at: part.sends for at, part in parts.items()}, send_base, sending=True)
        receives, receive_splits = self._lay_out(
            {at: part.receives for at, part in parts.items()}, self.dst_base, sending=False
        )
        own = tuple(
            OwnCopy(
                at,
                *self._place(at, send_base, copy.src_tensor, copy.src_start),
                *self._place(at, self.dst_base, copy.dst_tensor, copy.dst_start),
                copy.sizes,
                copy.partial_index,
            )
            for at, part in parts.items()
            for copy in part.own
        )
        return Step(stage > 0, exchanges, send_splits, receive_splits, sends, receives, own)

    def _place(self, at: int, base: tuple[int, ...], tensor: int, start: Index) -> tuple[int, Index]:
        """Return the program's tensor of a copy of plan ``at``, and the start there."""
        places = (self.dst_places if base is self.dst_base else self.src_places)[at]
        if places is None:
            return base[at] + tensor, start  # planned tensors are the actual ones
        number, shift = places[tensor]
        return base[at] + number, tuple(map(add, start, shift))

    def _lay_out(
        self, by_plan: Mapping[int, Mapping[int, tuple[Copy, ...]]], base: tuple[int, ...], sending: bool
    ) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
        segments: list[Segment] = []
        splits = [0] * self.world_size
        offset = 0
        by_peer: dict[int, list[tuple[int, tuple[Copy, ...]]]] = {}
        for at in self.order:
            for peer, copies in by_plan.get(at, {}).items():
                by_peer.setdefault(peer, []).append((at, copies))
        for peer, found in sorted(by_peer.items()):
            begin = offset
            for at, copies in found:
                itemsize = self.plans[at].itemsize
                for copy in copies:
                    tensor, start = (copy.src_tensor, copy.src_start) if sending else (copy.dst_tensor, copy.dst_start)
                    size = prod(copy.sizes) * itemsize
                    tensor, start = self._place(at, base, tensor, start)
                    segments.append(Segment(at, tensor, start, copy.sizes, offset, size, copy.partial_index))
                    offset += size
            offset += -offset % self.padding  # the next message starts aligned
            splits[peer] = offset - begin
        return tuple(segments), tuple(splits)


def _only(part: RankSchedule, partial_index: int) -> RankSchedule:

    def chosen(copies: Iterable[Copy]) -> tuple[Copy, ...]:
        return tuple(copy for copy in copies if copy.partial_index == partial_index)

    return RankSchedule(
        {peer: chosen(found) for peer, found in part.sends.items() if chosen(found)},
        {peer: chosen(found) for peer, found in part.receives.items() if chosen(found)},
        chosen(part.own),
    )


def _round(part: RankSchedule, number: int, rounds: int) -> RankSchedule:
    """Return round ``number``: an equal share of the elements of each message; own copies go with the first."""
    return RankSchedule(
        {peer: _share(found, number, rounds) for peer, found in part.sends.items()},
        {peer: _share(found, number, rounds) for peer, found in part.receives.items()},
        part.own if number == 0 else (),
    )


def _share(copies: tuple[Copy, ...], number: int, rounds: int) -> tuple[Copy, ...]:
    total = sum(copy.numel for copy in copies)
    low, high = number * total // rounds, (number + 1) * total // rounds
    found: list[Copy] = []
    position = 0
    for copy in copies:
        begin, end = max(low - position, 0), min(high - position, copy.numel)
        if begin < end:
            for offset, sizes in row_major_boxes(copy.sizes, begin, end):
                found.append(_part(copy, offset, sizes))
        position += copy.numel
    return tuple(found)


def _part(copy: Copy, offset: Index, sizes: Index) -> Copy:
    if sizes == copy.sizes:
        return copy

    def moved(start: Index) -> Index:
        return tuple(a + b for a, b in zip(start, offset, strict=True))

    return copy._replace(
        start=moved(copy.start), sizes=sizes, src_start=moved(copy.src_start), dst_start=moved(copy.dst_start)
    )
