"""Partial sources: values are reduced as they arrive, in the order of their addends, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_reshard.dtypes import torch_dtype
from shard_reshard.kept_views import strided_views
from shard_reshard.packing import StepMemory
from shard_reshard.plan import ReshardPlan
from shard_reshard.program import accumulates_apart, reduction_dtype


class Reduction:
    """Where the plans of a program reduce, for the tensors of one call.

    Args:
        plans: The plans of the program.
        outs: Destination tensors.
        plan_of: For each of them, the number of its plan.

    Attributes:
        targets: Where values are reduced: the result itself, or tensors of a dtype that holds sums without rounding.
    """

    def __init__(self, plans: Sequence[ReshardPlan], outs: Sequence[torch.Tensor], plan_of: Sequence[int]) -> None:
        self.plans, self.outs, self.plan_of = plans, outs, plan_of
        self.targets = [
            _accumulator(out, plans[at]) if accumulates_apart(plans[at]) else out
            for out, at in zip(outs, plan_of, strict=True)
        ]

    def add(self, memory: StepMemory, arrived: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Reduce what arrived in a step and what stays on the rank."""
        incoming = [
            (entry.addend, entry.plan, entry.region, value)
            for entry, value in zip(memory.receives.packed, arrived, strict=False)
            if self.plans[entry.plan].reduce_op is not None
        ]
        own = [entry for entry in memory.own if self.plans[entry[2]].reduce_op is not None]
        values = strided_views(sources, [entry[0] for entry in own])
        incoming += [
            (addend, plan, region, value) for (_, region, plan, addend), value in zip(own, values, strict=True)
        ]
        incoming.sort(key=lambda entry: entry[0])
        targets = strided_views(self.targets, [region for _, _, region, _ in incoming])
        for (addend, at, _, value), target in zip(incoming, targets, strict=True):
            if addend == 0 and not self.plans[at].adjoint:
                target.copy_(value)
            else:
                _combine(self.plans[at].reduce_op, target, value)

    def settle(self) -> None:
        """Divide averages, and round what was reduced into the result."""
        for out, target, at in zip(self.outs, self.targets, self.plan_of, strict=True):
            plan = self.plans[at]
            if plan.reduce_op is not None:
                if plan.divisor > 1:
                    target.div_(plan.divisor)
                if target is not out:
                    out.copy_(target)


def _accumulator(out: torch.Tensor, plan: ReshardPlan) -> torch.Tensor:
    """It lies in memory as the result does, so that regions of one are regions of the other."""
    dtype = torch_dtype(reduction_dtype(plan))
    target = torch.empty_like(out, dtype=dtype)
    if target.stride() == out.stride():
        return target
    return torch.empty_strided(out.size(), out.stride(), dtype=dtype, device=out.device)


# Mixed dtypes are added on CPUs by way of a copy of one operand: at most so many elements at a time.
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
        value = value.to(target.dtype)  # torch does not mix 8-bit floats with others
    if op == "sum":
        target.add_(value)
    elif op == "product":
        target.mul_(value)
    else:
        value = value.to(target.dtype)
        torch.minimum(target, value, out=target) if op == "min" else torch.maximum(target, value, out=target)
