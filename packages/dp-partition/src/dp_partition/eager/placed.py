"""Parameters in FSDP2's shards, within a call and between two: what one rank alone does to them is found.

FSDP2 has no replicas to compare. A rank that skips an optimizer step would leave its shards as they are, in silence,
and a rank that returns nothing would let its peers wait for the result's other shards. So ranks meet at the end of each
call, in a group of their own: a rank that ends early waits there, and its message is not taken for one of FSDP2's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dp_partition._shared.consensus import device_types, named_collective, ranks_of
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import flat_group, group_like
from dp_partition.runtime.state import HeldMemory

_ENDS, _PICKLES, _RAISED = range(3)  # states of a rank that meets its peers


class PlacedShards:
    """The parameters in shards of a step, with their memory and the number of writes to each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, name: str) -> None:
        self.name, self.mesh = name, mesh
        self.parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        self.digest = self.results = 0  # of the shards written in all calls; of the sharded results of the last call
        self.versions: list[int] = []  # of the shards, at the start of the present call
        self.has_raised = False  # whether all ranks have raised by a message of this call
        self.leaving: Any = None  # the message of a rank that has raised, until its peers read it
        self.group = flat_group(mesh)
        self.meets = "cpu" in device_types(dist.get_backend_config(self.group)) and mesh.size() > 1
        if self.meets and self.parameters:
            self.group = group_like(self.group, ranks_of(mesh))
        self.memory = HeldMemory(self.parameters)

    def check_assigned(self) -> None:
        """Raise for ``p.data = ...`` on a parameter in shards between two calls: a DTensor ignores it.

        Raises:
            PlanError: ``parameter-replaced``, with the names.
        """
        if problems := self.memory.moved():
            raise PlanError(problems)

    def are_in(self, roots: Iterable[nn.Module]) -> bool:
        """Return True if modules hold all shards. FSDP2 would put back a parameter that the caller has removed."""
        held = {id(p) for root in roots for module in root.modules() for p in module._parameters.values()}
        return held.issuperset(map(id, self.parameters.values()))

    def start_call(self) -> None:
        self.has_raised, self.versions = False, [p._version for p in self.parameters.values()]

    def note_written(self) -> None:
        """Add the shards that the call has written to the digest of all calls, whether it has raised or not."""
        written = bytes([p._version != old for p, old in zip(self.parameters.values(), self.versions, strict=True)])
        self.digest = zlib.crc32(written, self.digest)

    def end_call(self, call: int, results: list[DTensor], *, always: bool) -> None:
        """Meet the peers at the end of a call.

        Without a CPU backend ranks meet in few calls alone, as the host would wait for the device in each.

        Args:
            call: Its number.
            results: Sharded tensors in the step's result, in order.
            always: Meet in this call in any case.

        Raises:
            PlanError: On every rank: ``ranks-diverge`` where ranks have written other shards since they met last, or
                return other results; ``rank-failed`` if one has raised.
        """
        self.results = zlib.crc32(repr([(x.shape, x.dtype, x.placements) for x in results]).encode())
        if not self.parameters or self.mesh.size() == 1 or not (self.meets or always):
            return
        highest, lowest, update, negative_update, result, negative_result = self._meet(_ENDS, f"the end of call {call}")
        self._raise_unless_together(call, highest, lowest)
        hint = "decide on values that are equal on all ranks, for example after dist.all_reduce"
        if update != -negative_update:
            reason = f"ranks have updated different parameters by call {call}: one has skipped an optimizer step"
            hint += "; shards are of different calls now: load a checkpoint"
            raise PlanError(Problem("ranks-diverge", self.name, found=reason, hint=hint))
        if result != -negative_result:
            raise PlanError(
                Problem(
                    "ranks-diverge",
                    self.name,
                    found=f"ranks return other tensors in call {call}, whose shards only all of them can gather",
                    hint=hint,
                )
            )

    def meet_in_call(self, call: int) -> None:
        """Meet in the middle of a call, before a pickle gathers a shard that a peer may not gather.

        Raises:
            PlanError: On every rank: ``rank-failed``, or ``ranks-diverge`` where some rank has ended the call.
        """
        if self.meets and self.parameters:
            highest, lowest, *_ = self._meet(_PICKLES, f"a pickle of a shard in call {call}")
            self._raise_unless_together(call, highest, lowest)

    def _meet(self, state: int, subject: str) -> list[int]:
        row = self._row(state)
        with named_collective(f"{self.name}, {subject}"):
            dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group)
        highest, negative_lowest, *digests = row.tolist()
        return [highest, -negative_lowest, *digests]

    def _raise_unless_together(self, call: int, highest: int, lowest: int) -> None:
        self.has_raised = highest != lowest
        if highest == _RAISED:
            raise PlanError(
                Problem(
                    "rank-failed",
                    self.name,
                    found=f"another rank raised in call {call}",
                    hint="see the traceback of that rank",
                )
            )
        if highest != lowest:
            raise PlanError(
                Problem(
                    "ranks-diverge",
                    self.name,
                    found=f"some ranks alone pickle a shard in call {call}, which only all of them can gather",
                    hint="torch.save on every rank, or between two calls within unsharded()",
                )
            )

    def _row(self, state: int) -> torch.Tensor:
        digests = (self.digest, -self.digest, self.results, -self.results)
        return torch.tensor([state, -state, *digests], device=self._device)

    def leave(self) -> None:
        """Make peers raise where they meet next in their call, without a wait for them: they may be elsewhere."""
        if self.meets and self.parameters and not self.has_raised:
            row = self._row(_RAISED)
            self.leaving = row, dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.meets else next(iter(self.parameters.values())).device
