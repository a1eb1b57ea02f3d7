"""The exchange: pack, one all-to-all, unpack. The only module that sends tensor data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import foreach_copy_, is_fake
from shard_reshard.dtypes import torch_dtype
from shard_reshard.kept_views import KeptViews, strided_views
from shard_reshard.packing import Run, Side, StepMemory, lay_out_step
from shard_reshard.plan import ReshardPlan
from shard_reshard.program import Program, Step, accumulates_apart, reduction_dtype

_ALIGNMENT = 16  # bytes; the largest element is a complex128
# What these hold is moved as plain integers of the same size: not every copy kernel knows them.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
_PLAIN |= {"complex64", "complex128"}

# Sends `input` cut into `input_splits` bytes, receives `output`; returns a work to wait for, or None when it is done.
Collective = Callable[[torch.Tensor, torch.Tensor, list[int], list[int], bool], "dist.Work | None"]


def all_to_all_in(group: dist.ProcessGroup | None) -> Collective:
    """The collective of an exchange in ``group``."""

    def collective(
        output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> dist.Work | None:
        work: dist.Work | None
        work = dist.all_to_all_single(output, input, output_splits, input_splits, group=group, async_op=async_op)
        return work

    return collective


class _Flying(NamedTuple):
    """A collective under way, and what has to stay alive until it is unpacked."""

    work: dist.Work | None
    step: Step
    memory: StepMemory
    sent: torch.Tensor
    buffer: torch.Tensor | None  # what arrives, where that is not the result itself
    slot: int

    def wait(self) -> None:
        """Wait for the collective."""
        if self.work is not None:
            self.work.wait()


class Exchange:
    """A program on real tensors.

    Args:
        program: What to do.
        keep_workspace: Keep buffers from call to call; the caller then sees to it that one call ends before the next.
    """

    def __init__(self, program: Program, keep_workspace: bool = False) -> None:
        self.program = program
        self._kept: dict[tuple[object, ...], torch.Tensor] | None = {} if keep_workspace else None
        self._memories: dict[tuple[object, ...], tuple[StepMemory, ...]] = {}
        self._wire_dtypes = [
            torch_dtype(plan.wire_dtype) if self._as_values(plan) else _carrier(plan) for plan in program.plans
        ]
        self._out_dtypes = [torch_dtype(plan.out_dtype) for plan in program.plans]
        # Whether tensors are copied as they are: no dtype that could be conjugated, none that travels as integers.
        self._as_they_are = all(
            self._as_values(plan) and not {plan.dtype, plan.out_dtype} & {"complex32", "complex64", "complex128"}
            for plan in program.plans
        )
        # What a call asks of the program, worked out once: it costs as much as moving a few kilobytes.
        self.reducing = [plan.reduce_op is not None for plan in program.plans]
        self.reduces = any(self.reducing)
        self.overlaps = program.overlaps
        self.num_exchanges = sum(step.exchanges for step in program.steps)
        self.fills = [
            (range(program.dst_base[at], program.dst_base[at + 1]), value)
            for at, plan in enumerate(program.plans)
            if (value := plan.fill(program.rank)) is not None
        ]
        self._repeated: _Call | None = None
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._kept_views = (KeptViews(), KeptViews()) if keep_workspace else None
        self._src_plan = _plan_numbers(program.src_base)
        self._dst_plan = _plan_numbers(program.dst_base)

    @staticmethod
    def _as_values(plan: ReshardPlan) -> bool:
        return plan.dtype != plan.out_dtype or plan.reduce_op is not None or plan.dtype in _PLAIN

    # ---- one call ---------------------------------------------------------------------------------------------

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """Fresh destination tensors."""
        return [
            torch.empty(shape, dtype=self._out_dtypes[plan], device=device)
            for shape, plan in zip(self.program.dst_shapes, self._dst_plan, strict=True)
        ]

    def start(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        collective: Collective,
        device: torch.device,
        async_op: bool,
        fresh_outs: bool = True,
        repeated: bool = False,
    ) -> Callable[[], None]:
        """Move ``sources`` into ``outs``.

        Args:
            sources: This rank's source tensors.
            outs: Its destination tensors.
            collective: What sends.
            device: Where buffers are to be.
            async_op: Return when the last collective is under way.
            fresh_outs: No call will come with the memory of these ``outs``, so nothing is kept for them.
            repeated: These tensors look as those of the call before: same memory, shapes, strides and dtypes.

        Returns:
            A function that waits for what is still under way and unpacks it. With ``async_op`` that is the last
            collective, else nothing.
        """
        steps = self._call(sources, outs, collective, device, async_op, fresh_outs, repeated).steps()
        left = self.num_exchanges
        for flying in steps:
            left -= 1
            if left == 0 and async_op:

                def finish(flying: _Flying = flying) -> None:
                    flying.wait()
                    for _ in steps:
                        raise AssertionError("one collective more than the program has")

                return finish
            flying.wait()
        return _nothing

    def steps(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        collective: Collective,
        device: torch.device,
        async_op: bool = False,
    ) -> Iterator[_Flying]:
        """The same step by step: yields each collective when it is time to wait for it."""
        return _Call(self, sources, outs, collective, device, async_op).steps()

    def _call(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        collective: Collective,
        device: torch.device,
        async_op: bool,
        fresh_outs: bool,
        repeated: bool,
    ) -> _Call:
        """A call, the one before once more where nothing of it has changed."""
        if not repeated or self._kept is None:
            self._repeated = None
            return _Call(self, sources, outs, collective, device, async_op, fresh_outs)
        call = self._repeated
        if call is None or not call.is_of(sources, outs):
            # Kept without their graphs: what was computed before a tensor is not held on to.
            sources, outs = [t.detach() for t in sources], [t.detach() for t in outs]
            call = self._repeated = _Call(self, sources, outs, collective, device, async_op, fresh_outs)
        else:
            call.begin_again(collective, async_op)
        return call

    # ---- memory -----------------------------------------------------------------------------------------------

    def memories(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> tuple[StepMemory, ...]:
        """Where each step's bytes lie, for tensors of these strides."""
        src_strides = tuple(tensor.stride() for tensor in sources)
        dst_strides = tuple(tensor.stride() for tensor in outs)
        key = (src_strides, dst_strides)
        if key not in self._memories:
            self._memories[key] = tuple(
                lay_out_step(
                    step,
                    self.program.plans,
                    self.program.rank,
                    dst_strides if step.relayed else src_strides,
                    dst_strides,
                )
                for step in self.program.steps
            )
        return self._memories[key]

    def buffer(self, name: str, slot: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A buffer of at least ``num_bytes``, rounded up to whole alignments; kept ones are handed out again."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._kept is None:
            return torch.empty(size, dtype=torch.uint8, device=device)
        key = (name, slot, device)
        found = self._kept.get(key)
        if found is None or found.numel() < size:
            found = self._kept[key] = torch.empty(size, dtype=torch.uint8, device=device)
            self._views = {view: tensors for view, tensors in self._views.items() if view[:3] != key}
        return found

    def buffer_views(self, name: str, slot: int, buffer: torch.Tensor, side: Side) -> list[torch.Tensor]:
        """The places of a side's regions in a buffer, as tensors of their shapes; kept with a kept buffer."""
        key = (name, slot, buffer.device, id(side))  # sides live as long as the exchange, in `_memories`
        found = self._views.get(key) if self._kept is not None else None
        if found is None:
            typed: dict[torch.dtype, torch.Tensor] = {}
            found = []
            for entry in side.packed:
                dtype = self._wire_dtypes[entry.plan]
                if dtype not in typed:
                    typed[dtype] = buffer.view(dtype)
                place = entry.byte_offset // dtype.itemsize
                found.append(typed[dtype].as_strided(entry.region.sizes, entry.strides, place))
            if self._kept is not None:
                self._views[key] = found
        return found

    def carried(self, tensors: Sequence[torch.Tensor], plans: Sequence[int]) -> list[torch.Tensor]:
        """The tensors in the dtype in which they are copied: their own, or a plain one of the same size."""
        if self._as_they_are:
            return [tensor.resolve_neg() for tensor in tensors]  # the tensor itself, where nothing is negated
        found = []
        for tensor, plan in zip(tensors, plans, strict=True):
            tensor = tensor.resolve_conj().resolve_neg()
            if not self._as_values(self.program.plans[plan]):
                tensor = tensor.view(self._wire_dtypes[plan])
            found.append(tensor)
        return found


class _Call:
    """One call of an exchange: its tensors and what is under way."""

    def __init__(
        self,
        exchange: Exchange,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        collective: Collective,
        device: torch.device,
        async_op: bool,
        fresh_outs: bool = True,
    ) -> None:
        self.exchange, self.collective, self.device = exchange, collective, device
        self.async_op = async_op or exchange.overlaps
        self.src = exchange.carried(sources, exchange._src_plan)
        self.dst = exchange.carried(outs, exchange._dst_plan)
        self.memories = exchange.memories(self.src, self.dst)
        self.reducing, self.reduces = exchange.reducing, exchange.reduces
        self.targets = self._accumulators() if self.reduces else self.dst
        self._fill()
        self.src_views, self.dst_views = self._local_views(fresh_outs)

    def is_of(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
        """Whether the call is of tensors in this memory still; what it holds may have been moved meanwhile."""
        if self.reduces or len(sources) != len(self.src) or len(outs) != len(self.dst):
            return False
        given = [tensor.data_ptr() for tensors in (sources, outs) for tensor in tensors]
        return given == [tensor.data_ptr() for tensors in (self.src, self.dst) for tensor in tensors]

    def begin_again(self, collective: Collective, async_op: bool) -> None:
        """Make ready for the same call once more."""
        self.collective = collective
        self.async_op = async_op or self.exchange.overlaps
        self._fill()

    def _local_views(self, fresh_outs: bool) -> tuple[KeptViews, KeptViews]:
        """The views of source and destination tensors; kept ones where the exchange keeps a workspace."""
        kept = self.exchange._kept_views
        if kept is None or is_fake((*self.src, *self.dst)):
            return KeptViews(), KeptViews()
        kept[0].begin(self.src)
        kept[1].begin(() if fresh_outs else self.dst)
        return kept[0], (KeptViews() if fresh_outs else kept[1])

    def _accumulators(self) -> list[torch.Tensor]:
        """Where values are reduced: the result itself, or tensors of a dtype that holds sums without rounding."""
        targets = []
        for out, at in zip(self.dst, self.exchange._dst_plan, strict=True):
            plan = self.exchange.program.plans[at]
            apart = accumulates_apart(plan)
            target = torch.empty_like(out, dtype=torch_dtype(reduction_dtype(plan))) if apart else out
            # An accumulator lies in memory as its result does, so that regions of one are regions of the other.
            targets.append(target if target.stride() == out.stride() else _strided_like(out, target.dtype))
        return targets

    def _fill(self) -> None:
        for tensors, value in self.exchange.fills:
            for at in tensors:
                self.targets[at].fill_(value)

    # ---- the steps --------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[_Flying]:
        """Go through the program; yields each collective when it is time to wait for it."""
        program = self.exchange.program
        flying: _Flying | None = None
        settled = not self.reduces
        for number, (step, memory) in enumerate(zip(program.steps, self.memories, strict=True)):
            if flying is not None and (step.relayed or not self.exchange.overlaps):
                yield flying
                self._land(flying)
                flying = None
            if step.relayed and not settled:
                self._settle()  # what is passed on is the reduced value
                settled = True
            following = self._launch(number % 2, step, memory)
            if flying is not None:
                yield flying
                self._land(flying)
            flying = following
        if flying is not None:
            yield flying
            self._land(flying)
        if not settled:
            self._settle()

    def _launch(self, slot: int, step: Step, memory: StepMemory) -> _Flying | None:
        """Pack and send; copy what stays while it is under way."""
        if not step.exchanges:
            self._copy_own(step, memory)
            if self.reduces and not step.relayed:
                self._reduce(memory, [])
            return None
        sent = self._pack(memory.sends, self.dst if step.relayed else self.src, slot)
        side, buffer = memory.receives, None
        if side.run is not None:
            received = _bytes_of(self.dst[side.run.tensor], side.run)
            _note_writing(self.dst[side.run.tensor])
        else:
            buffer = self.exchange.buffer("receive", slot, side.num_bytes, self.device)
            received = buffer[: side.num_bytes]
        work = self.collective(received, sent, list(side.splits), list(memory.sends.splits), self.async_op)
        self._copy_own(step, memory)
        return _Flying(work, step, memory, sent, buffer, slot)

    def _pack(self, side: Side, base: Sequence[torch.Tensor], slot: int) -> torch.Tensor:
        if side.run is not None:
            return _bytes_of(base[side.run.tensor], side.run)
        buffer = self.exchange.buffer("send", slot, side.num_bytes, self.device)
        if side.packed:
            targets = self.exchange.buffer_views("send", slot, buffer, side)
            views = self.dst_views if base is self.dst else self.src_views
            sources = views.get("send", slot, side, base, lambda: [entry.region for entry in side.packed])
            foreach_copy_(targets, sources)
        return buffer[: side.num_bytes]

    def _copy_own(self, step: Step, memory: StepMemory) -> None:
        """Copies that stay on the rank; those that are reduced wait for their turn in `_reduce`."""
        plain = [entry for entry in memory.own if not self.reducing[entry[2]]] if self.reduces else memory.own
        if plain:
            base, views = (self.dst, self.dst_views) if step.relayed else (self.src, self.src_views)
            sources = views.get("own", 0, memory, base, lambda: [entry[0] for entry in plain])
            foreach_copy_(self.dst_views.get("own to", 0, memory, self.dst, lambda: [e[1] for e in plain]), sources)

    def _land(self, flying: _Flying) -> None:
        """Unpack a collective that has been waited for."""
        side = flying.memory.receives
        arrived: list[torch.Tensor] = []
        if flying.buffer is not None and side.packed:
            arrived = self.exchange.buffer_views("receive", flying.slot, flying.buffer, side)
            values, regions = arrived, lambda: [entry.region for entry in side.packed]
            if self.reduces and not flying.step.relayed:
                plain = [at for at, entry in enumerate(side.packed) if not self.reducing[entry.plan]]
                values, regions = [arrived[at] for at in plain], lambda: [side.packed[at].region for at in plain]
            foreach_copy_(self.dst_views.get("receive", flying.slot, side, self.dst, regions), values)
        if self.reduces and not flying.step.relayed:
            self._reduce(flying.memory, arrived)

    def _reduce(self, memory: StepMemory, arrived: list[torch.Tensor]) -> None:
        """Reduce what arrived and what stayed, in the order of the addends, the same on every rank."""
        incoming = [
            (entry.addend, entry.plan, entry.region, value)
            for entry, value in zip(memory.receives.packed, arrived, strict=False)
            if self.reducing[entry.plan]
        ]
        own = [entry for entry in memory.own if self.reducing[entry[2]]]
        values = strided_views(self.src, [entry[0] for entry in own])
        incoming += [
            (addend, plan, region, value) for (_, region, plan, addend), value in zip(own, values, strict=True)
        ]
        incoming.sort(key=lambda entry: entry[0])
        targets = strided_views(self.targets, [region for _, _, region, _ in incoming])
        for (addend, at, _, value), target in zip(incoming, targets, strict=True):
            plan = self.exchange.program.plans[at]
            if addend == 0 and not plan.adjoint:
                target.copy_(value)
            else:
                _combine(plan.reduce_op, target, value)

    def _settle(self) -> None:
        """Divide averages, and round what was reduced into the result."""
        for out, target, at in zip(self.dst, self.targets, self.exchange._dst_plan, strict=True):
            plan = self.exchange.program.plans[at]
            if plan.reduce_op is not None:
                if plan.divisor > 1:
                    target.div_(plan.divisor)
                if target is not out:
                    out.copy_(target)


def _combine(op: str | None, target: torch.Tensor, value: torch.Tensor) -> None:
    if op == "sum":
        target.add_(value)
    elif op == "product":
        target.mul_(value)
    else:
        value = value.to(target.dtype)
        torch.minimum(target, value, out=target) if op == "min" else torch.maximum(target, value, out=target)


def _nothing() -> None:
    """What is left to do when nothing is."""


def _plan_numbers(base: Sequence[int]) -> list[int]:
    """For each tensor, the number of its plan."""
    return [at for at in range(len(base) - 1) for _ in range(base[at], base[at + 1])]


def _carrier(plan: ReshardPlan) -> torch.dtype:
    return _CARRIERS[plan.itemsize]


def _bytes_of(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """A stretch of a tensor's memory as bytes."""
    flat = tensor.as_strided((run.numel,), (1,), tensor.storage_offset() + run.offset)
    return flat.view(torch.uint8)


def _note_writing(tensor: torch.Tensor) -> None:
    """Tell autograd, which does not see what a collective writes: a graph that saved the tensor is stale now."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _strided_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=tensor.device)
