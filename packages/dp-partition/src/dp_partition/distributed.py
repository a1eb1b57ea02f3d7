"""Behind a `DistributedStep`: one of the steps over the parameters of an `EagerStep`, with its checks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dp_partition.capture.fingerprint import FunctionReads
from dp_partition.check.checked_call import CheckedEagerCall
from dp_partition.eager.step import EagerStep
from dp_partition.plan.placements import name_of, num_replicas, shard_world, warn_on_first
from dp_partition.plan.plan import ParamPlan, PartitionPlan, Settings, TensorInfo, not_placed
from dp_partition.runtime.consensus import raise_naming_peers


class DistributedRunner:
    """One step, with the number under which its parameters' `EagerStep` has it."""

    def __init__(self, eager: EagerStep, number: int, settings: Settings) -> None:
        self.eager, self.number, self.settings = eager, number, settings
        self.function, self.mesh = eager.steps[number].function, eager.mesh
        self.name = name_of(self.function)
        self.subject = ""  # call and rank, for errors of one rank
        self.reads = FunctionReads(self.function)
        self.checked: list[int] = []  # elements compared with the step on a full copy, by call
        self.unchecked = ""  # why a call was not
        if settings.check == "never" or not settings.observe:
            self.unchecked = "check='never'" if settings.check == "never" else "observe=False"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; compare the first ones, until one cannot be compared."""
        count = self.eager.steps[self.number].count
        self.subject = f"call {count + 1} of {self.name} on rank {dist.get_rank()}"
        try:
            # In shards call 2 is the first: one that keeps a gathered value is right in it, and wrong in call 3.
            if count < 2 + self.eager.is_sharded and not self.unchecked:
                return CheckedEagerCall(self, args, kwargs).run()
            return self.eager(args, kwargs, self.number)
        except Exception as error:
            raise_naming_peers(error, self.eager.token, self.mesh, self.subject)
            raise

    def leave_unchecked(self, reason: str) -> None:
        """Record that no call is compared from now on; warn if none was."""
        self.unchecked = reason
        if not self.checked:
            warn_on_first(
                self.mesh, f"{self.name}: no call is compared with the step on a full copy: {reason}", stacklevel=5
            )

    def checks(self) -> str:
        """Return the placement and the checked calls as text for the plan."""
        text = f"{len(self.checked)} calls of {self.name} checked against the step on a full copy"
        text += f", {sum(self.checked):,} elements"
        return "\n".join([self.eager.explain(), text + (f"; unchecked: {self.unchecked}" if self.unchecked else "")])

    def plan(self) -> PartitionPlan:
        """Return the placements of the parameters, with the report.

        Raises:
            PlanError: ``not-sharded`` before the first call.
        """
        if self.eager.reducer is None:
            raise not_placed(self.name)
        params = []
        for name, param in self.eager.parameters.items():
            info = TensorInfo(name, tuple(param.shape), param.dtype, param.requires_grad)
            placement = Shard(0) if isinstance(param, DTensor) else Replicate()
            reason = self.eager.units.full.get(name, "style")
            params.append(ParamPlan(info, placement, placement, placement, reason))
        replicas = num_replicas(self.mesh)
        return PartitionPlan(
            self.settings.style, "local", shard_world(self.mesh), tuple(params), replicas=replicas, checks=self.checks()
        )
