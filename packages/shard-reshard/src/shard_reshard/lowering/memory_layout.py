"""Memory layout of a step: regions copied through buffers, and regions used in place.

Pure: works on shapes, strides and numbers. `Exchange` creates the tensor views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shard_reshard.layout.shard_map import Index
from shard_reshard.lowering.program import Program, Segment, Step
from shard_reshard.plan.plan import Plan


class Region(NamedTuple):
    """A strided view of a local tensor: arguments of ``as_strided``; ``offset`` counts from the tensor's start."""

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
    """One side of a collective: a span used in place, or regions copied to or from a buffer."""

    span: Span | None
    packed: tuple[Packed, ...]
    splits: tuple[int, ...]
    num_bytes: int


class StepMemory(NamedTuple):
    """Both sides of a step, and the local copies outside of the collective."""

    sends: Side
    receives: Side
    own: tuple[tuple[Region, Region, int, int], ...]  # source, destination, plan, partial_index


def lay_out_step(
    step: Step,
    plans: Sequence[Plan],
    rank: int,
    send_strides: Sequence[Index],
    dst_strides: Sequence[Index],
) -> StepMemory:
    """Choose the variant with the fewest copied bytes for the strides; a relayed step sends from destinations."""
    itemsizes = [plan.itemsize for plan in plans]
    reducing = [plan.reduce_op is not None and not step.relayed for plan in plans]
    ways = [
        memory._replace(
            sends=_joined(memory.sends, itemsizes, [False] * len(plans)),
            receives=_joined(memory.receives, itemsizes, reducing),
        )
        for memory in _ways(step, plans, rank, send_strides, dst_strides)
    ]
    return min(ways, key=lambda memory: _cost(memory, itemsizes, rank))  # the first of equals: the same in every call


# Overhead of one copy call, in bytes copied in the same time.
_CALL_BYTES = 16 * 1024


def _cost(memory: StepMemory, itemsizes: Sequence[int], rank: int) -> int:
    """Estimate the time of a step's copies, in bytes: calls, reads and writes."""
    copied, calls = _copied(memory), len(memory.own)
    calls += sum(len(side.packed) for side in (memory.sends, memory.receives) if side.span is None)
    own = sum(prod(source.sizes) * itemsizes[plan] for source, _, plan, _ in memory.own)
    kept = sum(memory.sends.splits[rank : rank + 1])  # copied inside the collective
    return copied + own + kept + calls * _CALL_BYTES


def _ways(
    step: Step,
    plans: Sequence[Plan],
    rank: int,
    send_strides: Sequence[Index],
    dst_strides: Sequence[Index],
) -> Iterator[StepMemory]:
    """Yield the variants of a step: sides in place or not, local bytes in the collective or outside."""
    own = tuple(
        (
            _region(copy.src_tensor, copy.src_start, copy.sizes, send_strides),
            _region(copy.dst_tensor, copy.dst_start, copy.sizes, dst_strides),
            copy.plan,
            copy.partial_index,
        )
        for copy in step.own
    )
    sends = _packed(step.sends, send_strides)
    receives = _packed(step.receives, dst_strides)
    plain = StepMemory(
        Side(None, sends, step.send_splits, sum(step.send_splits)),
        Side(None, receives, step.receive_splits, sum(step.receive_splits)),
        own,
    )
    if not step.exchanges:
        yield plain
        return
    in_place = len(plans) == 1  # fused messages interleave tensors
    may_send = in_place and (plans[0].dtype == plans[0].wire_dtype or step.relayed)  # sent without a cast
    may_receive = in_place and plans[0].out_dtype == plans[0].wire_dtype and plans[0].reduce_op is None
    apart = StepMemory(_in_place(plain.sends, may_send), _in_place(plain.receives, may_receive), own)
    yield apart
    if not own or any(plan.reduce_op is not None for plan in plans):  # a reduction needs its addends apart
        return
    itemsizes = [plan.itemsize for plan in plans]
    sources = [(region, plan) for region, _, plan, _ in own]
    results = [(region, plan) for _, region, plan, _ in own]
    together = StepMemory(
        _in_place(_with_own(plain.sends, sources, rank, itemsizes), may_send),
        _in_place(_with_own(plain.receives, results, rank, itemsizes), may_receive),
        (),
    )
    bounded = any(plan.max_workspace_bytes is not None for plan in plans)
    if not bounded or _copied(together) <= _copied(apart):  # a bound leaves no room for more
        yield together


def buffer_bytes(program: Program) -> int:
    """Return the peak bytes of live buffers and accumulators for contiguous local tensors."""
    src = [dense_strides(shape) for shape in program.src_shapes]
    dst = [dense_strides(shape) for shape in program.dst_shapes]
    sizes = []
    for step in program.steps:
        memory = lay_out_step(step, program.plans, program.rank, dst if step.relayed else src, dst)
        sizes.append(_copied(memory))
    pairs = max((a + b for a, b in pairwise(sizes)), default=0) if program.overlaps else 0
    return max([*sizes, pairs], default=0) + program.accumulator_bytes


def dense_strides(sizes: Index) -> Index:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))


def _region(tensor: int, start: Index, sizes: Index, strides: Sequence[Index]) -> Region:
    own = strides[tensor]
    return Region(tensor, sizes, own, sum(at * stride for at, stride in zip(start, own, strict=True)))


def _packed(segments: Iterable[Segment], strides: Sequence[Index]) -> tuple[Packed, ...]:
    return tuple(
        Packed(_region(s.tensor, s.start, s.sizes, strides), s.offset, s.plan, s.partial_index, dense_strides(s.sizes))
        for s in segments
    )


def _with_own(side: Side, own: Sequence[tuple[Region, int]], rank: int, itemsizes: Sequence[int]) -> Side:
    """Insert the rank's own regions, each with its plan, in their slot of the collective."""
    begin = sum(side.splits[:rank])
    packed = [entry for entry in side.packed if entry.byte_offset < begin]
    offset = begin
    # Sorted by decreasing element size, as in every message: every position is aligned.
    for region, plan in sorted(own, key=lambda entry: (-itemsizes[entry[1]], entry[1])):
        packed.append(Packed(region, offset, plan, 0, dense_strides(region.sizes)))
        offset += prod(region.sizes) * itemsizes[plan]
    if len(set(itemsizes)) > 1:
        offset += -offset % max(itemsizes)
    own_bytes = offset - begin
    packed.extend(
        entry._replace(byte_offset=entry.byte_offset + own_bytes) for entry in side.packed if entry.byte_offset >= begin
    )
    splits = (*side.splits[:rank], own_bytes, *side.splits[rank + 1 :])
    return Side(None, tuple(packed), splits, side.num_bytes + own_bytes)


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
    joined = [entry for entries in alike.values() for entry in _series(entries, itemsizes[entries[0].plan])]
    return side._replace(packed=tuple(joined))


def _series(entries: list[Packed], itemsize: int) -> Iterator[Packed]:
    """Join entries of one shape at equal distances."""
    at = 0
    while at < len(entries):
        first, end = entries[at], at + 1
        steps = _apart(first, entries[end]) if end < len(entries) else (0, 0)
        while end < len(entries) and _apart(entries[end - 1], entries[end]) == steps:
            end += 1
        if end - at == 1 or min(steps) <= 0 or steps[1] % itemsize:
            yield first
            at += 1
            continue
        region = first.region
        sizes, strides = (end - at, *region.sizes), (steps[0], *region.strides)
        yield first._replace(
            region=region._replace(sizes=sizes, strides=strides), strides=(steps[1] // itemsize, *first.strides)
        )
        at = end


def _apart(one: Packed, other: Packed) -> tuple[int, int]:
    """Return the distance of two entries: elements in the tensor, bytes in the buffer."""
    return other.region.offset - one.region.offset, other.byte_offset - one.byte_offset


def _in_place(side: Side, allowed: bool) -> Side:
    span = _span([entry.region for entry in side.packed]) if allowed else None
    return side if span is None else side._replace(span=span)


def _span(regions: list[Region]) -> Span | None:
    """Return the span of memory formed by consecutive ``regions``, or None."""
    if not regions:
        return None
    first = regions[0]
    expected = first.offset
    for region in regions:
        if (
            region.tensor != first.tensor
            or region.offset != expected
            or not is_contiguous(region.sizes, region.strides)
        ):
            return None
        expected += prod(region.sizes)
    return Span(first.tensor, first.offset, expected - first.offset)


def is_contiguous(sizes: Index, strides: Index) -> bool:
    """Return True for a view of one span of memory in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:  # the stride of a dim of size 1 is arbitrary
            if stride != expected:
                return False
            expected *= size
    return True


ALIGNMENT = 16  # bytes; the largest element is a complex128


def aligned_bytes(side: Side) -> int:
    """Return the bytes of a side's buffer, in multiples of the alignment; 0 if it is used in place."""
    return 0 if side.span is not None else -(-side.num_bytes // ALIGNMENT) * ALIGNMENT


def buffer_room(memories: Iterable[StepMemory]) -> int:
    """Return the maximum bytes of buffers over the steps."""
    return max((aligned_bytes(memory.sends) + aligned_bytes(memory.receives) for memory in memories), default=0)


def _copied(memory: StepMemory) -> int:
    return sum(0 if side.span is not None else side.num_bytes for side in (memory.sends, memory.receives))
