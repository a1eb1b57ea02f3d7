"""Where a step's bytes lie in memory: which regions are copied, and which are sent or received where they are.

Pure: works on shapes, strides and numbers. `Exchange` turns the answer into tensor views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shard_reshard.bound import Index
from shard_reshard.plan import ReshardPlan
from shard_reshard.program import Program, Segment, Step


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
    addend: int
    strides: Index  # of the place in the buffer, in elements


class Run(NamedTuple):
    """One contiguous stretch of a local tensor's memory, in elements from the tensor's start."""

    tensor: int
    offset: int
    numel: int


class Side(NamedTuple):
    """One side of a collective: a run that is used in place, or regions that are copied to or from a buffer."""

    run: Run | None
    packed: tuple[Packed, ...]
    splits: tuple[int, ...]
    num_bytes: int


class StepMemory(NamedTuple):
    """Both sides of a step, and the copies that stay on the rank and bypass the collective."""

    sends: Side
    receives: Side
    own: tuple[tuple[Region, Region, int, int], ...]  # source, destination, plan, addend


def lay_out_step(
    step: Step,
    plans: Sequence[ReshardPlan],
    rank: int,
    send_strides: Sequence[Index],
    dst_strides: Sequence[Index],
) -> StepMemory:
    """Choose, for the given strides, the way that copies the fewest bytes.

    Args:
        step: What is sent, received and kept.
        plans: The plans of the program.
        rank: The rank in the group.
        send_strides: Strides of the tensors that are sent from (the destination's, in a relayed step).
        dst_strides: Strides of the destination tensors.
    """
    itemsizes = [plan.itemsize for plan in plans]
    reducing = [plan.reduce_op is not None and not step.relayed for plan in plans]
    memory = _chosen(step, plans, rank, send_strides, dst_strides)
    return memory._replace(
        sends=_joined(memory.sends, itemsizes, [False] * len(plans)),
        receives=_joined(memory.receives, itemsizes, reducing),
    )


def _chosen(
    step: Step,
    plans: Sequence[ReshardPlan],
    rank: int,
    send_strides: Sequence[Index],
    dst_strides: Sequence[Index],
) -> StepMemory:
    """Which sides are used in place, and whether the own bytes take part in the collective."""
    own = tuple(
        (
            _region(copy.src_tensor, copy.src_start, copy.sizes, send_strides),
            _region(copy.dst_tensor, copy.dst_start, copy.sizes, dst_strides),
            copy.plan,
            copy.addend,
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
    if len(plans) > 1 or not step.exchanges:
        return plain
    (plan,) = plans
    may_send = plan.dtype == plan.wire_dtype or step.relayed
    may_receive = plan.out_dtype == plan.wire_dtype and plan.reduce_op is None
    apart = StepMemory(_in_place(plain.sends, may_send), _in_place(plain.receives, may_receive), own)
    if not own or plan.reduce_op is not None:
        return apart
    size = plan.itemsize
    sends_with = _with_own(plain.sends, [entry[0] for entry in own], rank, size)
    receives_with = _with_own(plain.receives, [entry[1] for entry in own], rank, size)
    together = StepMemory(_in_place(sends_with, may_send), _in_place(receives_with, may_receive), ())
    # Both move the own bytes once; what differs is how many bytes are copied to and from buffers.
    return together if _copied(together) < _copied(apart) else apart


def buffer_bytes(program: Program) -> int:
    """The most bytes of buffers and accumulators that are alive at one time, local tensors being contiguous."""
    src = [dense_strides(shape) for shape in program.src_shapes]
    dst = [dense_strides(shape) for shape in program.dst_shapes]
    sizes = []
    for step in program.steps:
        memory = lay_out_step(step, program.plans, program.rank, dst if step.relayed else src, dst)
        sizes.append(_copied(memory))
    pairs = max((a + b for a, b in pairwise(sizes)), default=0) if program.overlaps else 0
    return max([*sizes, pairs], default=0) + program.accumulator_bytes


def dense_strides(sizes: Index) -> Index:
    """Strides of a contiguous tensor."""
    return tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))


def _region(tensor: int, start: Index, sizes: Index, strides: Sequence[Index]) -> Region:
    own = strides[tensor]
    return Region(tensor, sizes, own, sum(at * stride for at, stride in zip(start, own, strict=True)))


def _packed(segments: Iterable[Segment], strides: Sequence[Index]) -> tuple[Packed, ...]:
    return tuple(
        Packed(_region(s.tensor, s.start, s.sizes, strides), s.offset, s.plan, s.addend, dense_strides(s.sizes))
        for s in segments
    )


def _with_own(side: Side, own: list[Region], rank: int, itemsize: int) -> Side:
    """The side with the rank's own bytes in their slot of the collective."""
    own_bytes = sum(prod(region.sizes) for region in own) * itemsize
    begin = sum(side.splits[:rank])
    packed = [entry for entry in side.packed if entry.byte_offset < begin]
    offset = begin
    for region in own:
        packed.append(Packed(region, offset, 0, 0, dense_strides(region.sizes)))
        offset += prod(region.sizes) * itemsize
    packed.extend(
        entry._replace(byte_offset=entry.byte_offset + own_bytes) for entry in side.packed if entry.byte_offset >= begin
    )
    splits = (*side.splits[:rank], own_bytes, *side.splits[rank + 1 :])
    return Side(None, tuple(packed), splits, side.num_bytes + own_bytes)


def _joined(side: Side, itemsizes: Sequence[int], apart: Sequence[bool]) -> Side:
    """The side with regions of one tensor that follow each other in equal steps as one region of one dim more.

    What goes to several peers is then one copy: a copy of a few kilobytes costs less than calling it. Plans that are
    ``apart`` reduce what arrives, region by region.
    """
    if side.run is not None or len(side.packed) < 2:
        return side
    alike: dict[tuple[object, ...], list[Packed]] = {}
    for entry in side.packed:
        region = entry.region
        key = (region.tensor, region.sizes, region.strides) if not apart[entry.plan] else (len(alike),)
        alike.setdefault((*key, entry.plan), []).append(entry)
    joined = [entry for entries in alike.values() for entry in _series(entries, itemsizes[entries[0].plan])]
    return side._replace(packed=tuple(joined))


def _series(entries: list[Packed], itemsize: int) -> Iterator[Packed]:
    """Entries of one shape, those that are equally far apart as one."""
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
    """How far two entries are from each other: in elements of the tensor, in bytes of the buffer."""
    return other.region.offset - one.region.offset, other.byte_offset - one.byte_offset


def _in_place(side: Side, allowed: bool) -> Side:
    run = _run([entry.region for entry in side.packed]) if allowed else None
    return side if run is None else side._replace(run=run)


def _run(regions: list[Region]) -> Run | None:
    """The stretch of memory that ``regions`` are, one after the other, if they are one."""
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
    return Run(first.tensor, first.offset, expected - first.offset)


def is_contiguous(sizes: Index, strides: Index) -> bool:
    """Whether a strided view is one stretch of memory in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _copied(memory: StepMemory) -> int:
    return sum(0 if side.run is not None else side.num_bytes for side in (memory.sends, memory.receives))
