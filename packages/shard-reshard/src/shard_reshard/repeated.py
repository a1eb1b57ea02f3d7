"""Calls that come again and again with the same tensors: all views are made once, copies and collectives are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import foreach_copy_
from shard_reshard.calls import Collective, bytes_of, note_writing, nothing_left
from shard_reshard.kept_views import strided_views
from shard_reshard.packing import Side, StepMemory, room_of
from shard_reshard.program import Step

if TYPE_CHECKING:
    from shard_reshard.exchange import Exchange


class _Leaving(NamedTuple):
    """The side of a step that reads: copies into the buffer, what is sent, and what stays on the rank."""

    places: list[torch.Tensor]
    regions: list[torch.Tensor]
    sent: torch.Tensor | None  # None where nothing is exchanged
    splits: list[int]
    staying: list[torch.Tensor]


class _Arriving(NamedTuple):
    """The side of a step that writes."""

    places: list[torch.Tensor]
    regions: list[torch.Tensor]
    received: torch.Tensor | None
    splits: list[int]
    staying: list[torch.Tensor]
    written: torch.Tensor | None  # a destination that the collective itself writes to


class RepeatedCall:
    """A call of an exchange that keeps its buffers, does not reduce and does not overlap its steps.

    It holds its tensors, without their graphs; of destinations only those that come again too.

    Args:
        exchange: The exchange.
        sources: Source tensors.
        outs: Destination tensors.
        device: Where buffers are to be.
        fresh: Destinations are others in every call.
    """

    def __init__(
        self,
        exchange: Exchange,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        device: torch.device,
        fresh: bool,
    ) -> None:
        self.exchange, self.device, self.fresh = exchange, device, fresh
        self.src = exchange.carried([tensor.detach() for tensor in sources], exchange.src_plan)
        self.dst = exchange.carried([tensor.detach() for tensor in outs], exchange.dst_plan)
        memories = exchange.memories(self.src, self.dst)
        self.room = room_of(memories)
        self.steps = list(zip(exchange.program.steps, memories, strict=True))
        # A side's part of the buffer, and the places in it; sides live as long as the exchange.
        self._places: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self.relays = any(step.relayed for step in exchange.program.steps)
        self.leaving = [] if self.relays else [self._leaving(*step) for step in self.steps]
        self.arriving: list[_Arriving] = []

    def is_of(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], fresh: bool) -> bool:
        """Whether the call is of tensors in this memory still; what it holds may have been moved meanwhile."""
        if fresh is not self.fresh or len(sources) != len(self.src) or (not fresh and len(outs) != len(self.dst)):
            return False
        if [tensor.data_ptr() for tensor in sources] != [tensor.data_ptr() for tensor in self.src]:
            return False
        return fresh or [tensor.data_ptr() for tensor in outs] == [tensor.data_ptr() for tensor in self.dst]

    def run(self, outs: Sequence[torch.Tensor], collective: Collective, async_op: bool) -> Callable[[], None]:
        """Once more; as `Exchange.start`."""
        exchange, leaving, arriving = self.exchange, self.leaving, self.arriving
        if self.fresh:
            self.dst = exchange.carried(outs, exchange.dst_plan)
        for tensors, value in exchange.fills:
            for at in tensors:
                self.dst[at].fill_(value)
        if not arriving or self.fresh:
            arriving = [self._arriving(*step) for step in self.steps]
            if self.relays:  # what is sent on is read from destinations
                leaving = [self._leaving(*step) for step in self.steps]
            if self.fresh:
                self.dst = []
            else:
                self.leaving, self.arriving = leaving, arriving
        return _run(leaving, arriving, collective, async_op)

    def _leaving(self, step: Step, memory: StepMemory) -> _Leaving:
        tensors = self.dst if step.relayed else self.src
        staying = strided_views(tensors, [entry[0] for entry in memory.own])
        if not step.exchanges:
            return _Leaving([], [], None, [], staying)
        sent, places, regions = self._side(memory, memory.sends, tensors)
        return _Leaving(places, regions, sent, list(memory.sends.splits), staying)

    def _arriving(self, step: Step, memory: StepMemory) -> _Arriving:
        staying = strided_views(self.dst, [entry[1] for entry in memory.own])
        if not step.exchanges:
            return _Arriving([], [], None, [], staying, None)
        received, places, regions = self._side(memory, memory.receives, self.dst)
        run = memory.receives.run
        written = None if run is None else self.dst[run.tensor]
        return _Arriving(places, regions, received, list(memory.receives.splits), staying, written)

    def _side(
        self, memory: StepMemory, side: Side, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """What a side hands to the collective; places in it, and the regions of local tensors that go there."""
        if side.run is not None:
            return bytes_of(tensors[side.run.tensor], side.run), [], []
        found = self._places.get(id(side))
        if found is None:
            both = self.exchange.buffers(0, memory, self.room, self.device, {})
            buffer = both[0] if side is memory.sends else both[1]
            found = self._places[id(side)] = buffer[: side.num_bytes], self.exchange.buffer_views(0, buffer, side)
        return *found, strided_views(tensors, [entry.region for entry in side.packed])


def _run(
    leaving: list[_Leaving], arriving: list[_Arriving], collective: Collective, async_op: bool
) -> Callable[[], None]:
    for number, (out, into) in enumerate(zip(leaving, arriving, strict=True)):
        _copy(out.places, out.regions)
        work = None
        flies = async_op and number == len(leaving) - 1
        if out.sent is not None and into.received is not None:
            if into.written is not None:
                note_writing(into.written)
            work = collective(into.received, out.sent, into.splits, out.splits, flies)
        _copy(into.staying, out.staying)
        if work is not None and flies:
            return partial(_land_last, work, into, out)
        if work is not None:
            work.wait()
        _copy(into.regions, into.places)
    return nothing_left


def _land_last(work: dist.Work, into: _Arriving, sending: _Leaving) -> None:
    """Wait and unpack; what is still being sent is held until then."""
    work.wait()
    _copy(into.regions, into.places)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        foreach_copy_(targets, sources)
