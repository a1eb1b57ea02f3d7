"""Memory layout of a step: regions copied through buffers, and regions used in place.

Pure: works on shapes, strides and numbers. `Exchange` creates the tensor views.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from typing import NamedTuple

from shard_reshard.layout.shard_map import Index
from shard_reshard.lowering.program import Program, Step


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
    step: Step, program: Program, send_strides: Sequence[Index], dst_strides: Sequence[Index]
) -> StepMemory:
    """Choose, for the given strides, the way that copies the fewest bytes; a relayed step sends from destinations."""
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
    may_receive = may_receive and plans[0].reduce_op is None
    together = step.exchanges and own and not any(plan.reduce_op is not None for plan in plans)
    ways: list[tuple[int, int, StepMemory]] = []  # estimated cost, bytes of buffers
    # Own bytes go past the collective, or through it; either side lies in place where it is one span.
    for with_own in (False, True) if together else (False,):
        sends = _side(step, program, send_strides, True, with_own, may_send)
        receives = _side(step, program, dst_strides, False, with_own, may_receive)
        copied = sum(0 if side.span is not None else side.num_bytes for side in (sends, receives))
        if with_own and plans[0].max_workspace_bytes is not None and copied > ways[0][1]:
            break  # a bound leaves no room for more in the buffers
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
    sizes = []
    for step in program.steps:
        memory = lay_out_step(step, program, dst if step.relayed else src, dst)
        sizes.append(sum(0 if side.span is not None else side.num_bytes for side in memory[:2]))
    return max(sizes, default=0) + program.accumulator_bytes


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
