"""Partial sources: values are reduced as they arrive, in the order of their addends, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_reshard.layout.dtypes import torch_dtype
from shard_reshard.lowering.memory_layout import Region, StepMemory
from shard_reshard.lowering.program import accumulates_apart, reduction_dtype
from shard_reshard.plan.plan import Plan


class Reduction:
    """Accumulators of the reducing plans of a program, for one call.

    Attributes:
        targets: Where values are reduced: the result itself, or tensors of a dtype that holds sums without rounding.
    """

    def __init__(self, plans: Sequence[Plan], outs: Sequence[torch.Tensor], plan_of: Sequence[int]) -> None:
        self.plans, self.outs, self.plan_of = plans, outs, plan_of
        self.targets = [
            _accumulator(out, plans[at]) if accumulates_apart(plans[at]) else out
            for out, at in zip(outs, plan_of, strict=True)
        ]
        self._final = False

    def add(self, memory: StepMemory, arrived: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Reduce what arrived in a step and what stays on the rank."""
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
        incoming.sort(key=lambda entry: entry[0])
        targets = region_views(self.targets, [region for _, _, region, _ in incoming])
        for (partial_index, at, _, value), target in zip(incoming, targets, strict=True):
            if partial_index == 0 and not self.plans[at].adjoint:
                target.copy_(value)
            else:
                _combine(self.plans[at].reduce_op, target, value)

    def finalize(self) -> None:
        """Divide averages, and round what was reduced into the result; once."""
        if self._final:
            return
        self._final = True
        for out, target, at in zip(self.outs, self.targets, self.plan_of, strict=True):
            plan = self.plans[at]
            if plan.reduce_op is not None:
                if plan.divisor > 1:
                    target.div_(plan.divisor)
                if target is not out:
                    out.copy_(target)


def region_views(tensors: Sequence[torch.Tensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """Return regions of local tensors as strided views."""
    found = []
    for at, sizes, strides, offset in regions:
        tensor = tensors[at]
        place = tensor.storage_offset() + offset if offset else None
        found.append(tensor.as_strided(sizes, strides, place))
    return found


def _accumulator(out: torch.Tensor, plan: Plan) -> torch.Tensor:
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
