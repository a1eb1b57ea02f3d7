"""Calls: one run of an exchange on the tensors of one call, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import foreach_copy_, is_fake
from shard_reshard.kept_views import KeptViews
from shard_reshard.packing import Run, Side, StepMemory, room_of
from shard_reshard.program import Step
from shard_reshard.reducing import Reduction

if TYPE_CHECKING:
    from shard_reshard.exchange import Exchange

Buffers = dict[tuple[int, torch.device], torch.Tensor]  # by slot: the steps of two may be under way at a time

# Sends `input` cut into `input_splits` bytes, receives `output`; returns a work to wait for, or None when it is done.
Collective = Callable[[torch.Tensor, torch.Tensor, list[int], list[int], bool], "dist.Work | None"]


class Flying(NamedTuple):
    """A collective under way, and what has to stay alive until it is unpacked."""

    work: dist.Work | None
    step: Step
    memory: StepMemory
    sent: torch.Tensor
    buffer: torch.Tensor  # what arrives, where that is not the result itself
    slot: int

    def wait(self) -> None:
        """Wait for the collective."""
        if self.work is not None:
            self.work.wait()


def nothing_left() -> None:
    """What is left to do when nothing is."""


class Call:
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
        self.src = exchange.carried(sources, exchange.src_plan)
        self.dst = exchange.carried(outs, exchange.dst_plan)
        self.memories = exchange.memories(self.src, self.dst)
        self.room, self.buffers = room_of(self.memories), Buffers()
        self.reducing, self.reduces = exchange.reducing, exchange.reduces
        self.reduction = Reduction(exchange.program.plans, self.dst, exchange.dst_plan) if self.reduces else None
        self.targets = self.dst if self.reduction is None else self.reduction.targets
        self._fill()
        self.src_views, self.dst_views = self._local_views(fresh_outs)

    def _local_views(self, fresh_outs: bool) -> tuple[KeptViews, KeptViews]:
        """The views of source and destination tensors; kept ones where the exchange keeps a workspace."""
        kept = self.exchange.kept_views
        if kept is None or is_fake((*self.src, *self.dst)):
            return KeptViews(), KeptViews()
        kept[0].begin(self.src)
        kept[1].begin(() if fresh_outs else self.dst)
        return kept[0], (KeptViews() if fresh_outs else kept[1])

    def _fill(self) -> None:
        for tensors, value in self.exchange.fills:
            for at in tensors:
                self.targets[at].fill_(value)

    # ---- the steps --------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Flying]:
        """Go through the program; yields each collective when it is time to wait for it."""
        program = self.exchange.program
        flying: Flying | None = None
        settled = self.reduction is None
        for number, (step, memory) in enumerate(zip(program.steps, self.memories, strict=True)):
            if flying is not None and (step.relayed or not self.exchange.overlaps):
                yield flying
                self._land(flying)
                flying = None
            if step.relayed and self.reduction is not None and not settled:
                self.reduction.settle()  # what is passed on is the reduced value
                settled = True
            following = self._launch(number % 2 if self.exchange.overlaps else 0, step, memory)
            if flying is not None:
                yield flying
                self._land(flying)
            flying = following
        if flying is not None:
            yield flying
            self._land(flying)
        if self.reduction is not None and not settled:
            self.reduction.settle()

    def _launch(self, slot: int, step: Step, memory: StepMemory) -> Flying | None:
        """Pack and send; copy what stays while it is under way."""
        if not step.exchanges:
            self._copy_own(step, memory)
            if self.reduction is not None and not step.relayed:
                self.reduction.add(memory, [], self.src)
            return None
        packed, buffer = self.exchange.buffers(slot, memory, self.room, self.device, self.buffers)
        sent = self._pack(memory.sends, self.dst if step.relayed else self.src, slot, packed)
        side = memory.receives
        if side.run is not None:
            received = bytes_of(self.dst[side.run.tensor], side.run)
            note_writing(self.dst[side.run.tensor])
        else:
            received = buffer[: side.num_bytes]
        work = self.collective(received, sent, list(side.splits), list(memory.sends.splits), self.async_op)
        self._copy_own(step, memory)
        return Flying(work, step, memory, sent, buffer, slot)

    def _pack(self, side: Side, base: Sequence[torch.Tensor], slot: int, buffer: torch.Tensor) -> torch.Tensor:
        if side.run is not None:
            return bytes_of(base[side.run.tensor], side.run)
        if side.packed:
            targets = self.exchange.buffer_views(slot, buffer, side)
            views = self.dst_views if base is self.dst else self.src_views
            sources = views.get("send", slot, side, base, lambda: [entry.region for entry in side.packed])
            foreach_copy_(targets, sources)
        return buffer[: side.num_bytes]

    def _copy_own(self, step: Step, memory: StepMemory) -> None:
        """Copies that stay on the rank; those that are reduced wait for their turn in `Reduction.add`."""
        plain = [entry for entry in memory.own if not self.reducing[entry[2]]] if self.reduces else memory.own
        if plain:
            base, views = (self.dst, self.dst_views) if step.relayed else (self.src, self.src_views)
            sources = views.get("own", 0, memory, base, lambda: [entry[0] for entry in plain])
            foreach_copy_(self.dst_views.get("own to", 0, memory, self.dst, lambda: [e[1] for e in plain]), sources)

    def _land(self, flying: Flying) -> None:
        """Unpack a collective that has been waited for."""
        side = flying.memory.receives
        arrived: list[torch.Tensor] = []
        if side.run is None and side.packed:
            arrived = self.exchange.buffer_views(flying.slot, flying.buffer, side)
            values, regions = arrived, lambda: [entry.region for entry in side.packed]
            if self.reduces and not flying.step.relayed:
                plain = [at for at, entry in enumerate(side.packed) if not self.reducing[entry.plan]]
                values, regions = [arrived[at] for at in plain], lambda: [side.packed[at].region for at in plain]
            foreach_copy_(self.dst_views.get("receive", flying.slot, side, self.dst, regions), values)
        if self.reduction is not None and not flying.step.relayed:
            self.reduction.add(flying.memory, arrived, self.src)


def bytes_of(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """A stretch of a tensor's memory as bytes."""
    flat = tensor.as_strided((run.numel,), (1,), tensor.storage_offset() + run.offset)
    return flat.view(torch.uint8)


def note_writing(tensor: torch.Tensor) -> None:
    """Tell autograd, which does not see what a collective writes: a graph that saved the tensor is stale now."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
