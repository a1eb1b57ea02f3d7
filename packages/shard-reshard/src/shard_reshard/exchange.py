"""The exchange: pack, one all-to-all, unpack. The only module that sends tensor data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from shard_reshard.calls import Buffers, Call, Collective, Flying, nothing_left
from shard_reshard.dtypes import torch_dtype
from shard_reshard.kept_views import KeptViews
from shard_reshard.packing import Side, StepMemory, aligned_bytes, lay_out_step
from shard_reshard.plan import ReshardPlan
from shard_reshard.program import Program
from shard_reshard.repeated import RepeatedCall

# What these hold is moved as plain integers of the same size: not every copy kernel knows them.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
_PLAIN |= {"complex64", "complex128"}


class Exchange:
    """A program on real tensors.

    Args:
        program: What to do.
        keep_workspace: Keep buffers from call to call; the caller then sees to it that one call ends before the next.
    """

    def __init__(self, program: Program, keep_workspace: bool = False) -> None:
        self.program = program
        self._kept: Buffers | None = {} if keep_workspace else None
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
        self.repeated: RepeatedCall | None = None  # the call before, if it came again
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self.kept_views = (KeptViews(), KeptViews()) if keep_workspace else None
        self.src_plan = _plan_numbers(program.src_base)
        self.dst_plan = _plan_numbers(program.dst_base)

    @staticmethod
    def _as_values(plan: ReshardPlan) -> bool:
        return plan.dtype != plan.out_dtype or plan.reduce_op is not None or plan.dtype in _PLAIN

    # ---- one call ---------------------------------------------------------------------------------------------

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """Fresh destination tensors."""
        return [
            torch.empty(shape, dtype=self._out_dtypes[plan], device=device)
            for shape, plan in zip(self.program.dst_shapes, self.dst_plan, strict=True)
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
        if repeated and self._kept is not None and not (self.overlaps or self.reduces):
            call = self.repeated
            if call is None or not call.is_of(sources, outs, fresh_outs):
                call = self.repeated = RepeatedCall(self, sources, outs, device, fresh_outs)
            return call.run(outs, collective, async_op)
        self.repeated = None
        steps = Call(self, sources, outs, collective, device, async_op, fresh_outs).steps()
        left = self.num_exchanges
        for flying in steps:
            left -= 1
            if left == 0 and async_op:

                def finish(flying: Flying = flying) -> None:
                    flying.wait()
                    for _ in steps:
                        raise AssertionError("one collective more than the program has")

                return finish
            flying.wait()
            del flying  # its buffers are not to outlive their unpacking: the next step's are alive already
        return nothing_left

    def steps(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        collective: Collective,
        device: torch.device,
        async_op: bool = False,
    ) -> Iterator[Flying]:
        """The same step by step: yields each collective when it is time to wait for it."""
        return Call(self, sources, outs, collective, device, async_op).steps()

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

    def buffers(
        self, slot: int, memory: StepMemory, room: int, device: torch.device, found: Buffers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step packs into and what it receives into, rounded up to whole alignments.

        Both are parts of one buffer for each slot: steps that mostly send and steps that mostly receive share it.

        Args:
            slot: Steps of two slots may be under way at a time.
            memory: The step's.
            room: The most bytes that any step of the call needs.
            device: Where the buffer is to be.
            found: The buffers of this call, where none are kept.
        """
        held = found if self._kept is None else self._kept
        key = (slot, device)
        buffer = held.get(key)
        if buffer is None or buffer.numel() < room:
            with torch.inference_mode(False):  # a kept buffer is written to in any mode
                buffer = held[key] = torch.empty(room, dtype=torch.uint8, device=device)
            self._views = {view: tensors for view, tensors in self._views.items() if view[:2] != key}
        middle = aligned_bytes(memory.sends)
        return buffer[:middle], buffer[middle : middle + aligned_bytes(memory.receives)]

    def buffer_views(self, slot: int, buffer: torch.Tensor, side: Side) -> list[torch.Tensor]:
        """The places of a side's regions in its buffer, as tensors of their shapes; kept with a kept buffer."""
        key = (slot, buffer.device, id(side))  # sides live as long as the exchange, in `_memories`
        found = self._views.get(key) if self._kept is not None else None
        if found is None:
            typed: dict[torch.dtype, torch.Tensor] = {}
            found = []
            for entry in side.packed:
                dtype = self._wire_dtypes[entry.plan]
                if dtype not in typed:
                    typed[dtype] = buffer.view(dtype)
                place = typed[dtype].storage_offset() + entry.byte_offset // dtype.itemsize
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


def _plan_numbers(base: Sequence[int]) -> list[int]:
    """For each tensor, the number of its plan."""
    return [at for at in range(len(base) - 1) for _ in range(base[at], base[at + 1])]


def _carrier(plan: ReshardPlan) -> torch.dtype:
    return _CARRIERS[plan.itemsize]
