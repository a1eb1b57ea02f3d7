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
from dp_partition._torch_compat import flat_group, group_like, storage_key
from dp_partition.runtime.state import ASSIGN_HINT, ASSIGNED


class PlacedShards:
    """The parameters in shards of a step, with their memory and the number of writes to each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, name: str) -> None:
        self.name, self.mesh = name, mesh
        self.parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        self.digest = self.results = 0  # of the shards written in all calls; of the sharded results of the last call
        self.versions: list[int] = []  # of the shards, at the start of the present call
        self.leaving: Any = None  # the message of a rank that has raised, until its peers read it
        self.group = flat_group(mesh)
        self.meets = "cpu" in device_types(dist.get_backend_config(self.group)) and mesh.size() > 1
        if self.meets and self.parameters:
            self.group = group_like(self.group, ranks_of(mesh))
        self.hold()

    def hold(self) -> None:
        """Keep the memory of the shards, so that no key is used again, with the keys."""
        self.storages = [(name, p, p.untyped_storage(), storage_key(p)) for name, p in self.parameters.items()]

    def check_assigned(self) -> None:
        """Raise for ``p.data = ...`` on a parameter in shards between two calls: a DTensor ignores it.

        Raises:
            PlanError: ``parameter-replaced``, with the names.
        """
        lost = [name for name, p, _, key in self.storages if storage_key(p) != key]
        if lost:
            self.hold()  # a second call does not raise
            raise PlanError([Problem("parameter-replaced", name, found=ASSIGNED, hint=ASSIGN_HINT) for name in lost])

    def are_in(self, roots: Iterable[nn.Module]) -> bool:
        """Return True if modules hold all shards. FSDP2 would put back a parameter that the caller has removed."""
        held = {id(p) for root in roots for module in root.modules() for p in module._parameters.values()}
        return held.issuperset(map(id, self.parameters.values()))

    def start_call(self) -> None:
        self.versions = [p._version for p in self.parameters.values()]

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
        written = [p._version != old for p, old in zip(self.parameters.values(), self.versions, strict=True)]
        self.digest = zlib.crc32(bytes(written), self.digest)
        self.results = zlib.crc32(repr([(x.shape, x.dtype, x.placements) for x in results]).encode())
        if not self.parameters or self.mesh.size() == 1 or not (self.meets or always):
            return
        row = torch.tensor([0, self.digest, -self.digest, self.results, -self.results], device=self._device)
        with named_collective(f"{self.name}, the end of call {call}"):
            dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group)
        failed, update, negative_update, result, negative_result = row.tolist()
        if failed:
            reason, hint = f"another rank raised in call {call}", "see the traceback of that rank"
            raise PlanError(Problem("rank-failed", self.name, found=reason, hint=hint))
        hint = "decide on values that are equal on all ranks, for example after dist.all_reduce"
        if update != -negative_update:
            reason = f"ranks have updated different parameters by call {call}: one has skipped an optimizer step"
            hint += "; shards are of different calls now: load a checkpoint"
            raise PlanError(Problem("ranks-diverge", self.name, found=reason, hint=hint))
        if result != -negative_result:
            reason = f"ranks return other tensors in call {call}, whose shards only all of them can gather"
            raise PlanError(Problem("ranks-diverge", self.name, found=reason, hint=hint))

    def leave(self) -> None:
        """Make peers raise at the end of their call, without a wait for them: they may be in another collective."""
        if self.meets and self.parameters:
            row = torch.tensor([1, 0, 0, 0, 0], device=self._device)
            self.leaving = row, dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.meets else next(iter(self.parameters.values())).device
