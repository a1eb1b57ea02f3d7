"""The exchange: prepare a call, then run it. The only module that sends tensor data.

`Exchange.prepare` creates all views of a call: of local tensors and of buffers. A `PreparedCall` then packs, posts one
all-to-all for each step, copies local regions meanwhile, waits and unpacks. One-shot, kept, bounded, reducing and
simulated calls share this path and differ in the preparation only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import foreach_copy_, is_fake
from shard_reshard.layout.shard_map import torch_dtype
from shard_reshard.lowering import (
    Program,
    Region,
    Side,
    Span,
    StepMemory,
    accumulates_apart,
    lay_out_step,
    reduction_dtype,
)
from shard_reshard.plan import Plan


class Reduction:
    """Accumulators of the reducing plans of a program, for one call.

    Attributes:
        targets: Tensors of the sums: the result itself, or tensors of a dtype without rounding between additions.
    """

    def __init__(self, plans: Sequence[Plan], outs: Sequence[torch.Tensor], plan_of: Sequence[int]) -> None:
        self.plans, self.outs, self.plan_of = plans, outs, plan_of
        self.targets = list(outs)
        for number, (out, at) in enumerate(zip(outs, plan_of, strict=True)):
            if accumulates_apart(plans[at]):
                dtype = torch_dtype(reduction_dtype(plans[at]))
                # With the strides of the result, dense or not: both have the same regions.
                self.targets[number] = torch.empty_strided(out.size(), out.stride(), dtype=dtype, device=out.device)
        self._final = False  # averages are divided once

    def add(self, memory: StepMemory, arrived: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Reduce the arrivals of a step and the local regions."""
        incoming = [
            (entry.partial_index, entry.plan, entry.region, value)
            for entry, value in zip(memory.receives.packed, arrived, strict=False)
            if self.plans[entry.plan].reduce_op is not None
        ]
        own = [entry for entry in memory.own if self.plans[entry[2]].reduce_op is not None]
        values = region_views(sources, [entry[0] for entry in own])
        incoming += [
            (partial_index, plan, region, value)
            for (_, region, plan, partial_index), value in zip(own, values, strict=True)
        ]
        incoming.sort(key=lambda entry: entry[0])  # rank order: replicas round alike
        targets = region_views(self.targets, [region for _, _, region, _ in incoming])
        for (partial_index, at, _, value), target in zip(incoming, targets, strict=True):
            if partial_index == 0 and not self.plans[at].adjoint:  # the first value needs no initial zeros
                target.copy_(value)
            else:
                _combine(self.plans[at].reduce_op, target, value)

    def finalize(self) -> None:
        """Divide averages, and round reductions into the result; once."""
        if self._final:  # relays finalize early
            return
        self._final = True
        for out, target, at in zip(self.outs, self.targets, self.plan_of, strict=True):
            plan = self.plans[at]
            if plan.reduce_op is not None:
                if plan.divisor > 1:
                    target.div_(plan.divisor)
                if target is not out:  # rounded once, from the wide dtype
                    out.copy_(target)


def region_views(tensors: Sequence[torch.Tensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """Return regions of local tensors as strided views."""
    views = []
    for at, sizes, strides, offset in regions:
        tensor = tensors[at]
        place = tensor.storage_offset() + offset if offset else None
        views.append(tensor.as_strided(sizes, strides, place))
    return views


# On CPUs mixed dtypes are added through a copy of one operand: bound its size.
_MIXED_ELEMENTS = 16 * 1024


def _combine(op: str | None, target: torch.Tensor, value: torch.Tensor) -> None:
    if value.dtype != target.dtype and value.numel() > _MIXED_ELEMENTS:
        dim = max(range(value.dim()), key=value.size)
        step = max(1, _MIXED_ELEMENTS * value.size(dim) // value.numel())
        for start in range(0, value.size(dim), step):
            size = min(step, value.size(dim) - start)
            _combine(op, target.narrow(dim, start, size), value.narrow(dim, start, size))
        return
    if value.dtype.itemsize == 1 and value.dtype != target.dtype:
        value = value.to(target.dtype)  # torch does not mix 8-bit floats with other dtypes
    if op == "sum":
        target.add_(value)
    elif op == "product":
        target.mul_(value)
    else:
        value = value.to(target.dtype)
        torch.minimum(target, value, out=target) if op == "min" else torch.maximum(target, value, out=target)


# Other dtypes are moved as plain integers of the same size: not every copy kernel supports them.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
_PLAIN |= {"complex64", "complex128"}

_MAX_STRIDES = 256
_LATE = 2  # slot of the buffer of a late call's arrivals; steps take turns with 0 and 1
_NONE: list[torch.Tensor] = []  # never changed

# Sends `input`, split into `input_splits` bytes, and receives `output`; returns a work to wait for, or None if done.
Collective = Callable[[torch.Tensor, torch.Tensor, list[int], list[int], bool], "dist.Work | None"]


class SendSide(NamedTuple):
    """Reads of a step: regions to pack, bytes to send, local regions."""

    places: list[torch.Tensor]  # in the buffer
    regions: list[torch.Tensor]  # of local tensors
    sent: torch.Tensor | None  # None without an exchange
    splits: list[int]
    staying: list[torch.Tensor]


class RecvSide(NamedTuple):
    """Writes of a step."""

    arrived: list[torch.Tensor]  # all positions in the buffer; some may be reduced
    places: list[torch.Tensor]  # the ones to copy without reduction
    regions: list[torch.Tensor]
    received: torch.Tensor | None
    splits: list[int]
    staying: list[torch.Tensor]
    written: torch.Tensor | None  # destination of the collective itself


class InFlight(NamedTuple):
    """A posted collective, with references to everything it needs until it is unpacked."""

    work: dist.Work | None
    number: int  # of the step
    send: SendSide
    recv: RecvSide


@dataclass(eq=False)
class Workspace:
    """Buffers of calls that follow each other, and what was prepared for them; one call uses it at a time.

    Attributes:
        buffers: By slot and device.
        places: Views of a side's regions in a buffer, by slot, device and side; with the side, whose id must not be
            used again while it is here.
        prepared: The last call, after its tensors came again; it holds on to their memory.
        in_flight: True while a call writes to the buffers.
    """

    buffers: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    places: dict[tuple[int, torch.device, int], tuple[Side, list[torch.Tensor]]] = field(default_factory=dict)
    prepared: PreparedCall | None = None
    in_flight: bool = False
    _freed: Any = None  # CUDA event: the last copy out of the buffers

    def acquire(self, device: torch.device) -> None:
        """Reserve the buffers for a call.

        Raises:
            RuntimeError: A call is in flight.
        """
        if self.in_flight:
            raise RuntimeError(
                "this Resharder has a call in flight that uses its workspace; wait() for that handle first, "
                "or use a second Resharder"
            )
        self.in_flight = True
        if self._freed is not None:
            torch.cuda.current_stream(device).wait_event(self._freed)  # buffers may be read on another stream

    def release(self, device: torch.device) -> None:
        """Make the buffers available to the next call, which may run on another stream."""
        self.in_flight = False
        if device.type == "cuda" and not is_fake(()):
            if self._freed is None:
                self._freed = torch.cuda.Event()
            self._freed.record(torch.cuda.current_stream(device))

    def abandon(self) -> None:
        """Give up a call that nobody waits for: its collective may still write to these buffers, so they go."""
        self.buffers, self.places, self.prepared, self.in_flight = {}, {}, None, False

    def buffer(self, slot: int, room: int, device: torch.device) -> torch.Tensor:
        """Return the buffer of a slot, at least ``room`` bytes of it."""
        key = slot, device
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < room:
            with torch.inference_mode(False):  # a kept buffer is written in any mode
                buffer = self.buffers[key] = torch.empty(room, dtype=torch.uint8, device=device)
            if self.places:  # they view the old buffer
                self.places = {view: tensors for view, tensors in self.places.items() if view[:2] != key}
        return buffer

    def views(self, slot: int, part: torch.Tensor, side: Side, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return views of a side's regions in its ``part`` of a buffer, in the dtype of each plan."""
        key = slot, part.device, id(side)
        if key not in self.places:
            typed: dict[torch.dtype, torch.Tensor] = {}
            views, begin = [], part.storage_offset()  # in bytes, aligned
            for entry in side.packed:
                dtype = dtypes[entry.plan]
                if dtype not in typed:
                    typed[dtype] = part.view(dtype)
                place = (begin + entry.byte_offset) // dtype.itemsize
                views.append(typed[dtype].as_strided(entry.region.sizes, entry.strides, place))
            self.places[key] = side, views
        return self.places[key][1]


class Exchange:
    """A program on real tensors.

    With a ``workspace`` buffers are kept from call to call, and so is the last call after its tensors came again; the
    caller ensures that one call ends before the next. Without one each call has its own.

    With ``late`` (and one step without reductions) no destination is written before `PreparedCall.commit`: what arrives
    waits in a buffer of its own, and local regions wait with it. Without a commit all destinations stay as they were.
    """

    def __init__(self, program: Program, workspace: Workspace | None = None, late: bool = False) -> None:
        self.program, self.workspace = program, workspace
        # By strides: what each step reads and writes, and the most bytes of buffer that a step needs.
        self._memories: dict[tuple[object, ...], tuple[list[StepMemory], int]] = {}
        # As values where they are cast or reduced; else as themselves, or as plain integers of their size.
        self.as_values = [p.dtype != p.out_dtype or p.reduce_op is not None or p.dtype in _PLAIN for p in program.plans]
        self.wire_dtypes = [
            torch_dtype(plan.wire_dtype) if as_value else INTEGERS[plan.itemsize]
            for plan, as_value in zip(program.plans, self.as_values, strict=True)
        ]
        # Neither complex dtypes nor transfers as integers: tensors are copied without conversions.
        complex_ = any({plan.dtype, plan.out_dtype} & {"complex64", "complex128"} for plan in program.plans)
        self.copies_values = all(self.as_values) and not complex_
        self.reducing = [plan.reduce_op is not None for plan in program.plans]
        self.num_direct = sum(not step.relayed for step in program.steps)
        self.num_exchanges = sum(step.exchanges for step in program.steps)
        self.identity_values = [  # of destination tensors
            (number, value)
            for number, at in enumerate(program.dst_plan)
            if (value := program.plans[at].identity_value(program.rank)) is not None
        ]
        # Relays send out of destinations, and sums are added up in them: they are written before.
        self.late = late and len(program.steps) == 1 and True not in self.reducing and not self.identity_values
        out_dtypes = [torch_dtype(program.plans[at].out_dtype) for at in program.dst_plan]
        self._fresh = list(zip(program.dst_shapes, out_dtypes, strict=True))

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """Allocate destination tensors."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._fresh]

    def prepare(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        device: torch.device,
        fresh_outs: bool = True,
        unchanged: object = None,
    ) -> PreparedCall:
        """Prepare the call from ``sources`` to ``outs``, with buffers on ``device``.

        ``fresh_outs``: these will not come again, so no views of them are kept. ``unchanged``: the guards that found
        the metadata and memory of an earlier call again; None where there are none.
        """
        workspace = self.workspace or Workspace()
        call = workspace.prepared
        # One guard has seen one set of addresses: what was prepared after a match of it is for these tensors.
        if unchanged is None or call is None or (call.guard, call.fresh_outs) != (unchanged, fresh_outs):
            local = self.as_wire_dtype(sources, self.program.src_plan)
            call = PreparedCall(self, workspace, device, fresh_outs, local, guard=unchanged)
            # A call is kept from its memory's second occurrence on: one-time tensors are not referenced.
            workspace.prepared = None if unchanged is None or workspace is not self.workspace else call
            call.receive_into(outs)
        elif fresh_outs:
            call.receive_into(outs)
        return call

    # ---- memory -----------------------------------------------------------------------------------------------

    def memories(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> tuple[list[StepMemory], int]:
        """Return the reads and writes of each step for these strides, and a buffer's bytes."""
        key = src, dst = tuple(map(torch.Tensor.stride, sources)), tuple(map(torch.Tensor.stride, outs))
        if key not in self._memories:
            if len(self._memories) >= _MAX_STRIDES:  # callers whose strides differ in every call
                self._memories = {}
                if self.workspace is not None:
                    self.workspace.places = {}
            steps = self.program.steps
            laid_out = [
                lay_out_step(step, self.program, dst if step.relayed else src, dst, not self.late) for step in steps
            ]
            rooms = [memory.sends.room + (0 if self.late else memory.receives.room) for memory in laid_out]
            self._memories[key] = laid_out, max(rooms, default=0)
        return self._memories[key]

    def as_wire_dtype(self, tensors: Sequence[torch.Tensor], plans: Sequence[int]) -> list[torch.Tensor]:
        """Return detached tensors in the dtype of their copies. It is their own, or integers of that size."""
        # The memory itself, unless a view negates on reading.
        resolved = list(map(torch.Tensor.resolve_neg, map(torch.Tensor.detach, tensors)))
        if not self.copies_values:
            for at, plan in enumerate(plans):
                resolved[at] = resolved[at].resolve_conj()
                if not self.as_values[plan]:
                    resolved[at] = resolved[at].view(self.wire_dtypes[plan])
        return resolved


@dataclass(eq=False)
class PreparedCall:
    """A call with all its views; holds detached sources, and destinations that come again.

    Attributes:
        src: Sources in the dtype of their copies.
        dst: Destinations, likewise.
        memories: Reads and writes of each step.
        room: The most bytes of buffer that a step needs.
        sends, recvs: The views of each step.
        guard: The guards that found its tensors' memory again; None for a call that is not kept.
        rest: What is left of a late call when all has arrived.
    """

    exchange: Exchange
    workspace: Workspace
    device: torch.device
    fresh_outs: bool
    src: list[torch.Tensor]
    dst: list[torch.Tensor] = field(default_factory=list)
    memories: list[StepMemory] = field(default_factory=list)
    room: int = 0
    sends: list[SendSide] = field(default_factory=list)
    recvs: list[RecvSide] = field(default_factory=list)
    guard: object = None
    rest: Iterator[object] | None = None

    def receive_into(self, outs: Sequence[torch.Tensor]) -> None:
        """Create the views of destinations, and of sources unless they exist."""
        exchange, workspace = self.exchange, self.workspace
        # Of our own they have neither graphs nor lazy bits to take off.
        bare = self.fresh_outs and exchange.copies_values
        self.dst = list(outs) if bare else exchange.as_wire_dtype(outs, exchange.program.dst_plan)
        # Sources are the same in all calls of this object, and destinations of our own all have the same strides.
        if not (self.memories and self.fresh_outs):
            (self.memories, self.room), self.sends = exchange.memories(self.src, self.dst), []
        self.recvs = []
        for number, (step, memory) in enumerate(zip(exchange.program.steps, self.memories, strict=True)):
            slot = number % 2 if exchange.program.overlaps else 0
            buffer = workspace.buffer(slot, self.room, self.device) if step.exchanges else None
            # What arrives lands in a destination itself, or in the buffer behind what is sent.
            side, written = memory.receives, None
            staying = region_views(self.dst, memory.staying[1]) if memory.staying[1] else []
            arrived, places, regions, received = _NONE, _NONE, _NONE, None
            if buffer is not None and side.span is not None:
                written = self.dst[side.span.tensor]
                received = _bytes_of(written, side.span)
            elif buffer is not None:
                part = buffer[memory.sends.room : memory.sends.room + side.room]
                if exchange.late:  # kept longer than what is sent
                    part = workspace.buffer(_LATE, side.room, self.device)
                arrived = places = workspace.views(slot, part, side, exchange.wire_dtypes) if side.packed else []
                packed = side.regions
                if True in exchange.reducing and not step.relayed:
                    plain = [at for at, entry in enumerate(side.packed) if not exchange.reducing[entry.plan]]
                    packed, places = tuple(packed[at] for at in plain), [arrived[at] for at in plain]
                regions = region_views(self.dst, packed) if packed else []
                received = part[: side.num_bytes]
            self.recvs.append(RecvSide(arrived, places, regions, received, list(side.splits), staying, written))
            if len(self.sends) > number and not step.relayed:
                continue
            del self.sends[number:]  # relayed steps send out of destinations, and come last
            side, tensors = memory.sends, self.dst if step.relayed else self.src
            staying = region_views(tensors, memory.staying[0]) if memory.staying[0] else []
            places, regions, sent = _NONE, _NONE, None
            if buffer is not None and side.span is not None:
                sent = _bytes_of(tensors[side.span.tensor], side.span)
            elif buffer is not None:
                # Steps that mostly send and steps that mostly receive share one buffer: first what is sent.
                part = buffer[: side.room]
                regions = region_views(tensors, side.regions) if side.regions else []
                places = workspace.views(slot, part, side, exchange.wire_dtypes) if regions else []
                sent = part[: side.num_bytes]
            self.sends.append(SendSide(places, regions, sent, list(side.splits), staying))

    # ---- run --------------------------------------------------------------------------------------------------

    def run(self, collective: Collective, async_op: bool) -> Callable[[], None] | None:
        """Move the tensors; with ``async_op`` until the last collective is posted.

        Returns:
            With ``async_op`` a function that waits for the last collective and unpacks it; else None.
        """
        exchange, steps, left = self.exchange, self.steps(collective, async_op), self.exchange.num_exchanges

        def finish(last: InFlight | None) -> None:
            if last is not None and last.work is not None:
                last.work.wait()
            for _ in steps:
                if not exchange.late:
                    raise AssertionError("one collective more than the program has")
                self.rest = steps
                return

        if left == 0 and async_op and exchange.late:
            return partial(finish, None)
        for in_flight in steps:
            left -= 1
            if left == 0 and async_op:
                return partial(finish, in_flight)
            if in_flight is not None and in_flight.work is not None:
                in_flight.work.wait()
            del in_flight  # frees its buffers: the next step's are allocated already
        return None

    def commit(self) -> None:
        """Write the destinations of a late call, which has arrived."""
        if self.rest is not None:
            next(self.rest, None)

    def steps(self, collective: Collective, async_op: bool = False) -> Iterator[InFlight | None]:
        """Run step by step; yields each collective when it has to be waited for, and None where a late call stops."""
        exchange = self.exchange
        reduction = (
            Reduction(exchange.program.plans, self.dst, exchange.program.dst_plan)
            if True in exchange.reducing
            else None
        )
        targets = self.dst if reduction is None else reduction.targets
        for at, value in exchange.identity_values:
            targets[at].fill_(value)
        overlaps = exchange.program.overlaps
        in_flight: InFlight | None = None
        for number, step in enumerate(exchange.program.steps):
            # A relayed step sends results of earlier ones. Bounded steps have two slots: one may stay in flight.
            if in_flight is not None and (step.relayed or not overlaps):
                yield in_flight
                self._unpack(in_flight, reduction)
                in_flight = None
            if step.relayed and reduction is not None:
                reduction.finalize()  # relays send the reduced value
            # Pack and send; copy local regions while it is in flight.
            send, recv, posted = self.sends[number], self.recvs[number], None
            if send.sent is not None and recv.received is not None:
                if send.places:
                    foreach_copy_(send.places, send.regions)
                if recv.written is not None and not recv.written.is_inference():
                    # Autograd does not see writes of a collective: mark graphs that saved the tensor as stale.
                    torch.autograd.graph.increment_version(recv.written)
                work = collective(recv.received, send.sent, recv.splits, send.splits, async_op or overlaps)
                posted = InFlight(work, number, send, recv)
            if recv.staying and not exchange.late:
                foreach_copy_(recv.staying, send.staying)
            if posted is None and reduction is not None and not step.relayed:
                reduction.add(self.memories[number], [], self.src)
            if in_flight is not None:
                yield in_flight
                self._unpack(in_flight, reduction)
            in_flight = posted
        if in_flight is not None:
            yield in_flight
        if exchange.late:
            for sent in self.sends[0].places[:1]:
                sent.untyped_storage().resize_(0)  # calls that wait for `commit` need what arrived alone
            yield None
            foreach_copy_(self.recvs[0].staying, self.sends[0].staying)
        if in_flight is not None:
            self._unpack(in_flight, reduction)
        if reduction is not None:
            reduction.finalize()
        if self.fresh_outs:  # they belong to the caller alone
            self.dst, self.recvs = [], []
            del self.sends[self.exchange.num_direct :]  # relayed steps send from them

    def _unpack(self, landed: InFlight, reduction: Reduction | None) -> None:
        if landed.recv.regions:
            foreach_copy_(landed.recv.regions, landed.recv.places)
        if reduction is not None and not self.exchange.program.steps[landed.number].relayed:
            reduction.add(self.memories[landed.number], landed.recv.arrived, self.src)


def _bytes_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    return tensor.as_strided((span.numel,), (1,), tensor.storage_offset() + span.offset).view(torch.uint8)
