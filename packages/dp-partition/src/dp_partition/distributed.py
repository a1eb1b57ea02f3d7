"""Behind a `DistributedStep`: one of the steps over the parameters of an `EagerStep`, with its checks."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from dp_partition.capture.fingerprint import FunctionReads
from dp_partition.check.checked_call import CheckedEagerCall, StepRunner
from dp_partition.eager.step import EagerStep
from dp_partition.plan.placements import num_replicas, shard_world
from dp_partition.plan.plan import ParamPlan, PartitionPlan, Settings, TensorInfo, not_placed


class DistributedRunner(StepRunner):
    """One step, with the number under which its parameters' `EagerStep` has it."""

    def __init__(self, eager: EagerStep, number: int, settings: Settings) -> None:
        super().__init__(eager.steps[number].function, eager.mesh, settings)
        self.eager, self.number = eager, number
        self.reads = FunctionReads(self.function)
        self.checked: list[int] = []  # elements compared with the step on a full copy, by call
        if settings.check == "never" or not settings.observe:
            self.schedule.unchecked.append("check='never'" if settings.check == "never" else "observe=False")

    @property
    def token(self) -> str:  # type: ignore[override]  # of all steps over the parameters
        return self.eager.token

    def due_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Run one call; compare the first ones, until one cannot be compared."""
        self.eager.take_over(args, kwargs, self.number)
        # In shards call 2 is the first: one that keeps a gathered value is right in it, and wrong in call 3.
        if self.schedule.num_checked < 2 + self.eager.is_sharded and not self.schedule.unchecked:
            return CheckedEagerCall(self, args, kwargs).run()
        return self.eager(args, kwargs, self.number)

    def checks(self) -> str:
        """Return the placement and the checked calls as text for the plan."""
        text = f"{self.schedule.num_checked} calls of {self.name} checked against the step on a full copy"
        text = "; unchecked: ".join([f"{text}, {sum(self.checked):,} elements", *self.schedule.unchecked])
        return "\n".join([self.eager.explain(), text])

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
