"""Parameters that the plan does not shard: each rank uses them on its own rows, so their gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec import _torch_compat
from shard_spec.acting.session import GroupRef


class SumGradient:
    """A tensor hook: the gradient summed over the group, in each backward before it is accumulated."""

    # Torch warns that hooks of a tensor are not saved with it; Replicas puts them back at the next forward.
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


class Replicas:
    """The replicated parameters of one module, by name, and the hooks on them.

    Copies of a module and parameters that start to need a gradient later get their hooks at the next forward of the
    root. So do parameters that were swapped with others, as ``module.to()`` does under
    ``torch.__future__.set_swap_module_params_on_conversion``: their hooks are listed still and run no more.
    """

    def __init__(self, group: GroupRef, names: tuple[str, ...]) -> None:
        self.group = group
        self.names = names
        self._handles: list[Any] = []
        self._hooked: dict[str, int] = {}  # by name, the address of what was hooked

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "names": self.names, "_handles": [], "_hooked": {}}

    def watch(self, root: nn.Module) -> None:
        """Hook every parameter that needs a gradient and has no such hook yet."""
        for name in self.names:
            path, _, attribute = name.rpartition(".")
            parameter = root.get_submodule(path)._parameters.get(attribute)
            if parameter is None or not parameter.requires_grad or isinstance(parameter, DTensor):
                continue  # sharded by a later call, or frozen
            if not sums_over(parameter, self.group.group):
                hook = SumGradient(self.group)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]  # untyped in torch
            elif self._hooked.get(name) != parameter._cdata:
                _torch_compat.revive_hooks(parameter)
            self._hooked[name] = parameter._cdata

    def remove(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def sums_over(parameter: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the gradient of ``parameter`` is summed over ``group`` already."""
    return any(
        isinstance(hook, SumGradient) and hook.group.group is group for hook in _torch_compat.tensor_hooks(parameter)
    )


def foreign_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody else hooked ``parameter``: a replacement would lose these hooks."""
    return any(not isinstance(hook, SumGradient) for hook in _torch_compat.tensor_hooks(parameter))
