"""Gradients of parameters that the plan does not shard: each rank uses them on its own rows, so they are summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shard_spec import _torch_compat
from shard_spec.apply.session import GroupRef


class SumGradient:
    """A tensor hook: the gradient summed over the group, in each backward before it is accumulated."""

    # Torch warns that hooks of a tensor are not saved with it; Roster puts them back at the next forward.
    __torch_unserializable__ = True

    def __init__(self, group: GroupRef) -> None:
        self.group = group

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum; every rank's backward calls it in the same order."""
        summed: torch.Tensor = _Sum.apply(grad, self.group.group)  # type: ignore[no-untyped-call]  # untyped in torch
        return summed


class _Sum(torch.autograd.Function):
    """The sum over a group; its own backward, where ranks go on with it differently."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        summed = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]  # untyped in torch


def sums_over(parameter: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the gradient of ``parameter`` is summed over ``group`` already."""
    return any(each.group is group for each in summed_over(parameter))


def summed_over(parameter: torch.Tensor) -> list[GroupRef]:
    """The groups over which the gradient of ``parameter`` is summed."""
    return [hook.group for hook in _torch_compat.tensor_hooks(parameter) if isinstance(hook, SumGradient)]


def foreign_hooks(parameter: torch.Tensor) -> bool:
    """Return whether somebody else hooked ``parameter``: a replacement would lose these hooks."""
    return any(not isinstance(hook, SumGradient) for hook in _torch_compat.tensor_hooks(parameter))
