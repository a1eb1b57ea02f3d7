"""Gradients of sharded modules: summed over the ranks, counted on one rank only."""

from __future__ import annotations

from collections.abc import Callable

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


def counted_on(here: bool, value: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``value`` where ``here``, else ``otherwise`` (default: zeros), to which no gradient goes.

    Every rank keeps the value in its graph, so that hooks on it run everywhere, but only some ranks count.
    """
    other = torch.zeros_like(value) if otherwise is None else otherwise
    return torch.where(value.new_full((), here, dtype=torch.bool), value, other.detach())  # filled there: no copy
