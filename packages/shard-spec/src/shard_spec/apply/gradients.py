"""Gradients of sharded modules: summed over the ranks, counted on one rank only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shard_spec import _torch_compat
from shard_spec.distributed.parameter_format import GroupRef


class SumGradient:
    """A tensor hook: the gradient summed over the group, in each backward before it is accumulated."""

    # Torch warns that hooks of a tensor are not saved with it; ModuleTracker puts them back at the next forward.
    __torch_unserializable__ = True

    def __init__(self, group: GroupRef, note: Callable[[], None]) -> None:
        self.group = group
        self.note = note  # ranks compare at the next forward what they have summed

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum; every rank's backward calls it in the same order."""
        self.note()
        refuse_second_derivative()
        summed = grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group.group)
        return summed


def refuse_second_derivative() -> None:
    """Raise in a backward with ``create_graph=True``: its result would lack what other ranks add."""
    if torch.is_grad_enabled():
        raise RuntimeError("a sharded module has no second derivatives: leave out create_graph=True")


def sums_over(parameter: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the gradient of ``parameter`` is summed over ``group`` already."""
    return any(each.group is group for each in summed_over(parameter))


def summed_over(parameter: torch.Tensor) -> list[GroupRef]:
    """The groups over which the gradient of ``parameter`` is summed."""
    return [hook.group for hook in _torch_compat.tensor_hooks(parameter) if isinstance(hook, SumGradient)]


def masked_identity(value: torch.Tensor, *, forward: bool, backward: bool) -> torch.Tensor:
    """``value`` or zeros of its shape; its gradient is handed on or is zeros.

    Every rank keeps the value in its graph, so that hooks on it run everywhere, but only some ranks count.
    """
    output: torch.Tensor = _Gate.apply(value, forward, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.counts = backward
        return value.view_as(value) if forward else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None, None
