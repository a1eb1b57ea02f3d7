"""From a plan to bytes, for one rank: steps, splits and places in memory.

A program executes one plan or several fused ones. Its steps are the collectives, equally many on every rank. Within
a step the bytes for one peer are contiguous: fused plans by decreasing element size (so that every segment is
aligned), the copies of a plan in one order on both ends. For given strides, `lay_out_step` decides what of a step is
copied through buffers and what is used in place; `Exchange` creates the tensor views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from math import prod
from operator import add, itemgetter
from typing import NamedTuple

from shard_reshard._shared.problems import refusal
from shard_reshard.layout.shard_map import ITEMSIZES, REDUCED_IN_FLOAT32, Index, human, new_tuple
from shard_reshard.plan import Copy, Plan, RankSchedule, all_ranks_copies, is_local, rank_schedule


@lru_cache(maxsize=1024)
def num_rounds(plan: Plan, stage: int, partial_index: int | None) -> int:
    """Return the number of rounds of a stage (or one addend). The same on every rank.

    Each message is split into that many shares of nearly equal size. Two rounds are in flight at a time, so a round's
    buffers, for sends and receives, may use half of the bound. A bound that single elements exceed is refused.
    """
    assert plan.max_workspace_bytes is not None
    # Elements of every message, by pair of ranks; for each rank, of those that it sends or receives.
    pairs = Counter[tuple[int, int]]()
    for copy in all_ranks_copies(plan):
        if copy.stage == stage and partial_index in (None, copy.partial_index) and copy.src_rank != copy.dst_rank:
            pairs[copy.src_rank, copy.dst_rank] += copy.numel
    by_rank: list[list[int]] = [[] for _ in range(plan.world_size)]
    for pair, size in pairs.items():
        for rank in pair:
            by_rank[rank].append(size)
    rounds = 1
    for messages in by_rank:
        total = sum(messages)
        # A round, one of two in flight, may hold one more element of each message than the average.
        room = plan.max_workspace_bytes // 2 // plan.itemsize - len(messages)
        if total > room + len(messages):
            if room < 1:
                reason = f"{human(plan.max_workspace_bytes)} for {len(messages)} messages of a rank"
                least = 2 * (len(messages) + 1) * plan.itemsize
                raise refusal(
                    "invalid-argument",
                    "max_workspace_bytes",
                    found=reason,
                    hint=f"allow at least {least:,} bytes ({human(least)}), by bucket_bytes= where a state dict or a "
                    "file moves; a MiB or more keeps the rounds few",
                )
            rounds = max(rounds, -(-total // room))
    return rounds


def row_major_boxes(sizes: Index, begin: int, end: int) -> Iterator[tuple[Index, Index]]:
    """Yield the boxes of elements ``begin`` to ``end`` (row-major) of ``sizes``, in order."""
    if begin >= end:
        return
    zero = (0,) * len(sizes)
    if (begin, end) == (0, prod(sizes)):
        yield zero, sizes
        return
    inner = prod(sizes[1:])  # elements of a row
    first, last = -(-begin // inner), end // inner  # full rows
    if begin % inner:  # a partial first row, or a part of one row
        for offset, part in row_major_boxes(sizes[1:], begin % inner, min(inner, end - (first - 1) * inner)):
            yield (first - 1, *offset), (1, *part)
    if first < last:
        yield (first, *zero[1:]), (last - first, *sizes[1:])
    if end % inner and first <= last:  # a partial last row
        for offset, part in row_major_boxes(sizes[1:], 0, end % inner):
            yield (last, *offset), (1, *part)


class Step(NamedTuple):
    """One collective and the copies around it."""

    relayed: bool  # what is sent comes out of destination tensors
    exchanges: bool  # False where no rank has anything to send: no collective then
    parts: Mapping[int, RankSchedule]  # by fused plan; copies name the program's local tensors


@dataclass(frozen=True)
class Program:
    """All steps of one rank.

    Attributes:
        plans: The fused plans.
        rank: The rank in the group.
        world_size: Size of the group.
        src_shapes, dst_shapes: Shapes of the local tensors, those of all plans concatenated.
        src_plan, dst_plan: For each of these local tensors the number of its plan.
        steps: The collectives, in order.
        order: Plans in the order of a message: of falling element size, so that every place is aligned.
        overlaps: True if the next step is posted before a step is unpacked.
    """

    plans: tuple[Plan, ...]
    rank: int
    world_size: int
    src_shapes: tuple[Index, ...]
    dst_shapes: tuple[Index, ...]
    src_plan: tuple[int, ...]
    dst_plan: tuple[int, ...]
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    overlaps: bool

    @cached_property
    def accumulator_bytes(self) -> int:
        """Bytes of accumulators for reductions that cannot use the result."""
        return sum(
            ITEMSIZES[reduction_dtype(self.plans[at])] * prod(shape)
            for at, shape in zip(self.dst_plan, self.dst_shapes, strict=True)
            if accumulates_apart(self.plans[at])
        )


Places = Sequence[tuple[int, Index]] | None


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
    steps: list[Step] = []
    for stage in range(2 if any(plan.uses_scatter_allgather for plan in plans) else 1):
        parts = {}
        for at, plan in enumerate(plans):
            if schedule := rank_schedule(plan, rank)[stage : stage + 1]:
                base = dst_base[at] if stage else src_base[at], dst_base[at]
                places = (plan.dst if stage else plan.src).places(rank), plan.dst.places(rank)
                moved = places != (None, None) or base != (0, 0)
                parts[at] = _placed(schedule[0], base, places) if moved else schedule[0]
        if len(plans) == 1 and plans[0].max_workspace_bytes is not None:
            # One partial value after the other: then the order of additions is that of the unbounded plan.
            (plan,), local = plans, is_local(plans[0])
            in_order = plan.reduce_op is not None and not plan.adjoint and stage == 0
            for partial_index in range(plan.src.num_partials) if in_order else [None]:
                rounds = 1 if local else num_rounds(plan, stage, partial_index)
                shares = [_round(parts[0], partial_index, number, rounds) for number in range(rounds)]
                steps += [Step(stage > 0, not local, {0: share}) for share in shares]
        else:
            steps.append(Step(stage > 0, any(not is_local(plans[at]) for at in parts), parts))
    src, dst = (tuple(shape for shapes in side for shape in shapes) for side in (src_shapes, dst_shapes))
    order = tuple(sorted(range(len(plans)), key=lambda at: (-plans[at].itemsize, at)))
    overlaps = any(plan.max_workspace_bytes is not None for plan in plans)
    src_plan = tuple([at for at, shapes in enumerate(src_shapes) for _ in shapes])
    dst_plan = tuple([at for at, shapes in enumerate(dst_shapes) for _ in shapes])
    return Program(plans, rank, world_size, src, dst, src_plan, dst_plan, tuple(steps), order, overlaps)


def _placed(part: RankSchedule, base: tuple[int, int], places: tuple[Places, Places]) -> RankSchedule:
    """Return the part with copies between the program's tensors, after those of earlier plans."""

    def placed(copy: Copy, sends: bool, receives: bool) -> Copy:  # of what peers have, this rank's side is known
        ends = [copy[6:8], copy[8:]]  # tensor and start
        for side in (0,) * sends + (1,) * receives:
            (tensor, start), place = ends[side], places[side]
            number, shift = (tensor, None) if place is None else place[tensor]
            ends[side] = base[side] + number, start if shift is None else tuple(map(add, start, shift))
        return new_tuple(Copy, (*copy[:6], *ends[0], *ends[1]))

    return RankSchedule(
        {peer: tuple([placed(copy, True, False) for copy in copies]) for peer, copies in part.sends.items()},
        {peer: tuple([placed(copy, False, True) for copy in copies]) for peer, copies in part.receives.items()},
        tuple([placed(copy, True, True) for copy in part.own]),
    )


def _round(part: RankSchedule, partial_index: int | None, number: int, rounds: int) -> RankSchedule:
    """Return round ``number`` of a part (or one addend): an equal share of each message, own copies with the first."""

    def share(copies: Iterable[Copy]) -> tuple[Copy, ...]:
        chosen = [copy for copy in copies if partial_index in (None, copy.partial_index)]
        total, position, shares = sum(copy.numel for copy in chosen), 0, list[Copy]()
        low, high = number * total // rounds, (number + 1) * total // rounds
        for copy in chosen:
            begin, end = max(low - position, 0), min(high - position, copy.numel)
            for offset, sizes in row_major_boxes(copy.sizes, begin, end):
                starts = (tuple(map(add, start, offset)) for start in (copy.start, copy.src_start, copy.dst_start))
                start, src_start, dst_start = starts
                shares.append(copy._replace(start=start, sizes=sizes, src_start=src_start, dst_start=dst_start))
            position += copy.numel
        return tuple(shares)

    sends, receives = ({peer: share(copies) for peer, copies in side.items()} for side in part[:2])
    own = [copy for copy in part.own if partial_index in (None, copy.partial_index)] if number == 0 else []
    return RankSchedule(sends, receives, tuple(own))


# ---- memory of a step ------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """A strided view of a local tensor: arguments of ``as_strided``. ``offset`` counts from the tensor's start."""

    tensor: int
    sizes: Index
    strides: Index
    offset: int


class Packed(NamedTuple):
    """A region and its place in a buffer."""

    region: Region
    byte_offset: int
    plan: int
    partial_index: int
    strides: Index  # in the buffer, in elements


class Span(NamedTuple):
    """One contiguous span of a local tensor's memory, in elements from the tensor's start."""

    tensor: int
    offset: int
    numel: int


class Side(NamedTuple):
    """One side of a collective: a span used in place, or regions of a buffer."""

    span: Span | None
    packed: tuple[Packed, ...]
    splits: tuple[int, ...]
    num_bytes: int
    regions: tuple[Region, ...]  # of `packed`
    room: int  # bytes of a buffer, in whole alignments; none where it is used in place


class StepMemory(NamedTuple):
    """Both sides of a step, and the local copies outside of the collective."""

    sends: Side
    receives: Side
    own: tuple[tuple[Region, Region, int, int], ...]  # source, destination, plan, partial_index
    # Of these, source and destination of what is copied as it is; what is reduced waits for its turn.
    staying: tuple[tuple[Region, ...], tuple[Region, ...]] = ((), ())


ALIGNMENT = 16  # bytes; the largest element is a complex128
# Overhead of one copy call, in bytes copied in the same time.
_CALL_BYTES = 16 * 1024


def lay_out_step(
    step: Step,
    program: Program,
    send_strides: Sequence[Index],
    dst_strides: Sequence[Index],
    receive_in_place: bool = True,
) -> StepMemory:
    """Choose, for the given strides, the fewest copied bytes. A relayed step sends from destinations.

    Without ``receive_in_place`` all that arrives passes through a buffer.
    """
    plans, itemsizes = program.plans, [plan.itemsize for plan in program.plans]
    reducing = [plan.reduce_op is not None and not step.relayed for plan in plans]
    own = tuple(
        (
            _region(copy.src_tensor, copy.src_start, copy.sizes, send_strides),
            _region(copy.dst_tensor, copy.dst_start, copy.sizes, dst_strides),
            at,
            copy.partial_index,
        )
        for at, part in step.parts.items()
        for copy in part.own
    )
    may_send = step.exchanges and len(plans) == 1 and (plans[0].dtype == plans[0].wire_dtype or step.relayed)
    may_receive = step.exchanges and len(plans) == 1 and plans[0].out_dtype == plans[0].wire_dtype
    may_receive = may_receive and plans[0].reduce_op is None and receive_in_place
    together = step.exchanges and own and not any(plan.reduce_op is not None for plan in plans)
    ways: list[tuple[int, int, StepMemory]] = []  # estimated cost, bytes of buffers
    # Own bytes go past the collective, or through it; either side lies in place where it is one span.
    for with_own in (False, True) if together else (False,):
        sends = _side(step, program, send_strides, True, with_own, may_send)
        receives = _side(step, program, dst_strides, False, with_own, may_receive)
        copied = sum(0 if side.span is not None else side.num_bytes for side in (sends, receives))
        if with_own and program.overlaps and copied > ways[0][1]:
            break  # rounds have no room for more in their buffers
        sends, receives = _joined(sends, itemsizes, [False] * len(plans)), _joined(receives, itemsizes, reducing)
        apart = () if with_own else own
        # Time in bytes: calls, reads and writes. Own bytes in a collective are copied inside of it.
        calls = len(apart) + sum(len(side.packed) for side in (sends, receives) if side.span is None)
        own_bytes = sum(prod(source.sizes) * itemsizes[plan] for source, _, plan, _ in apart)
        own_bytes += sum(sends.splits[program.rank : program.rank + 1])
        ways.append((copied + own_bytes + calls * _CALL_BYTES, copied, StepMemory(sends, receives, apart)))
    memory = min(ways, key=itemgetter(0))[2]  # the first of equals
    plain = [entry for entry in memory.own if plans[entry[2]].reduce_op is None]
    return memory._replace(staying=(tuple(entry[0] for entry in plain), tuple(entry[1] for entry in plain)))


def _side(
    step: Step, program: Program, strides: Sequence[Index], sending: bool, with_own: bool, may_be_span: bool
) -> Side:
    """Lay out what goes to each peer (or comes from it) one after the other.

    ``with_own``: to the rank itself too. ``may_be_span``: used in place, where regions are one span in their order.
    """
    messages = []
    for position, at in enumerate(program.order):
        if part := step.parts.get(at):
            messages += [
                (peer, position, copies) for peer, copies in (part.sends if sending else part.receives).items()
            ]
            if with_own and part.own:
                messages.append((program.rank, position, part.own))
    itemsizes = {plan.itemsize for plan in program.plans}
    padding = max(itemsizes) if len(itemsizes) > 1 else 1  # the message after this one is aligned too
    packed, splits, offset = list[Packed](), [0] * program.world_size, 0
    for peer, group in groupby(sorted(messages, key=itemgetter(0, 1)), key=itemgetter(0)):
        begin = offset
        for _, position, copies in group:
            at = program.order[position]
            for copy in copies:
                tensor, start = (copy.src_tensor, copy.src_start) if sending else (copy.dst_tensor, copy.dst_start)
                region = _region(tensor, start, copy.sizes, strides)
                packed.append(Packed(region, offset, at, copy.partial_index, dense_strides(copy.sizes)))
                offset += prod(copy.sizes) * program.plans[at].itemsize
        offset += -offset % padding
        splits[peer] = offset - begin
    span = None
    if may_be_span and packed:
        first = packed[0].region
        end = first.offset
        for region, *_ in packed:
            if (region.tensor, region.offset) != (first.tensor, end) or not is_contiguous(region.sizes, region.strides):
                break
            end += prod(region.sizes)
        else:
            span = Span(first.tensor, first.offset, end - first.offset)
    room = 0 if span is not None else -(-offset // ALIGNMENT) * ALIGNMENT
    return Side(span, tuple(packed), tuple(splits), offset, tuple(entry.region for entry in packed), room)


def buffer_bytes(program: Program) -> int:
    """Return the peak bytes of live buffers and accumulators for contiguous local tensors."""
    src = [dense_strides(shape) for shape in program.src_shapes]
    dst = [dense_strides(shape) for shape in program.dst_shapes]
    memories = [lay_out_step(step, program, dst if step.relayed else src, dst) for step in program.steps]
    sizes = [sum(0 if side.span is not None else side.num_bytes for side in memory[:2]) for memory in memories]
    pairs = max((a + b for a, b in pairwise(sizes)), default=0) if program.overlaps else 0
    return max([*sizes, pairs], default=0) + program.accumulator_bytes


def dense_strides(sizes: Index) -> Index:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))


def _region(tensor: int, start: Index, sizes: Index, strides: Sequence[Index]) -> Region:
    own = strides[tensor]
    return Region(tensor, sizes, own, sum(at * stride for at, stride in zip(start, own, strict=True)))


def _joined(side: Side, itemsizes: Sequence[int], apart: Sequence[bool]) -> Side:
    """Join regions of one tensor at equal distances into one region with one more dim.

    Data for several peers is then one copy: a copy of a few kilobytes costs less than its call. Plans marked ``apart``
    reduce arrivals region by region.
    """
    if side.span is not None or len(side.packed) < 2:
        return side
    alike: dict[tuple[object, ...], list[Packed]] = {}
    for entry in side.packed:
        region = entry.region
        key = (region.tensor, region.sizes, region.strides) if not apart[entry.plan] else (len(alike),)
        alike.setdefault((*key, entry.plan), []).append(entry)
    joined: list[Packed] = []
    for entries in alike.values():
        itemsize = itemsizes[entries[0].plan]
        # Distances to the next one: elements in the tensor, bytes in the buffer.
        steps = [(b.region.offset - a.region.offset, b.byte_offset - a.byte_offset) for a, b in pairwise(entries)]
        at = 0
        while at < len(entries):
            entry, end = entries[at], at + 1
            while end < len(entries) and steps[end - 1] == steps[at]:
                end += 1
            if end - at > 1 and min(steps[at]) > 0 and steps[at][1] % itemsize == 0:
                region, (step, num_bytes) = entry.region, steps[at]
                region = region._replace(sizes=(end - at, *region.sizes), strides=(step, *region.strides))
                entry = entry._replace(region=region, strides=(num_bytes // itemsize, *entry.strides))
            else:
                end = at + 1
            joined.append(entry)
            at = end
    return side._replace(packed=tuple(joined), regions=tuple(entry.region for entry in joined))


def is_contiguous(sizes: Index, strides: Index) -> bool:
    """Return True for a view of one span of memory in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:  # the stride of a dim of size 1 is arbitrary
            if stride != expected:
                return False
            expected *= size
    return True
