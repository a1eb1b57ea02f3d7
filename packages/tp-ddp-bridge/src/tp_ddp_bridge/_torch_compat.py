"""Every name of torch that this package takes from under an underscore.

Read against torch 2.13.0; the same names exist in 2.11.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

__all__ = [
    "DTensorSpec",
    "ScalerOfOneProcess",
    "default_axis_order",
    "flatten_axes",
    "foreach_norms",
    "foreach_scale",
    "holders",
    "local_of",
    "make_spec",
    "post_accumulate_hooks",
    "same_memory",
    "saved_tensors_hooks_in_force",
    "set_post_accumulate_hooks",
    "set_tensor_hooks",
    "tensor_hooks",
    "torch_bridge_hooks",
    "torch_bridge_spec",
    "waited",
    "wrap",
]


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """What a DTensor knows about itself, without a tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    """A DTensor around ``local``; operators that change a DTensor's layout give it another spec and leave this one."""
    return DTensor(local, spec, requires_grad=requires_grad)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a functional collective's result, once it has arrived."""
    if isinstance(tensor, AsyncCollectiveTensor):
        arrived: torch.Tensor = tensor.wait()
        return arrived
    return tensor


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor of ``tensor``, waited for; no autograd."""
    return waited(tensor._local_tensor)


def holders(tensor: torch.Tensor) -> int:
    """How many references there are to ``tensor`` from C++, its Python object counting as one."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # private, and so not in the stub
    return count


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are views of one storage; for fake tensors too."""
    alias: bool = torch._C._is_alias_of(tensor, other)  # type: ignore[attr-defined]  # private, and so not in the stub
    return alias


def default_axis_order(tensor: DTensor) -> bool:
    """Whether mesh axes that share a tensor dim cut it in mesh order, which is all that ``from_local`` can say."""
    spec = tensor._spec
    order: Any = getattr(spec, "shard_order", None)  # absent in 2.11 builds without ordered shards
    return order is None or bool(DTensorSpec.is_default_device_order(order))


def saved_tensors_hooks_in_force() -> object:
    """The innermost pack hook, ``None`` without any: a checkpointed region has its own."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """The dict of hooks that ``tensor.register_hook`` filled; handles remove from this very object."""
    return tensor._backward_hooks


def set_tensor_hooks(tensor: torch.Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make ``hooks`` the dict of hooks of ``tensor``."""
    tensor._backward_hooks = hooks


def post_accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """The dict of hooks that ``tensor.register_post_accumulate_grad_hook`` filled."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._post_accumulate_grad_hooks
    return hooks


def set_post_accumulate_hooks(tensor: torch.Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make ``hooks`` the dict of post-accumulate hooks of ``tensor``."""
    tensor._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]  # torch's stub forgets None


def foreach_norms(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor in one horizontal pass, computed and returned in ``dtype``."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def foreach_scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor by ``factor`` in place, in one horizontal pass."""
    torch._foreach_mul_(tensors, factor)


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh that runs over several axes of ``mesh``."""
    return mesh[axes]._flatten()


def torch_bridge_spec(tensor: torch.Tensor) -> DTensorSpec | None:
    """What torch's own ``_pre_dp_module_transform`` left on a parameter it made local."""
    spec = getattr(tensor, "_st_info", None)
    return spec if isinstance(spec, DTensorSpec) else None


def torch_bridge_hooks(hooks: Iterable[Any]) -> bool:
    """Whether torch's own swap-and-restore hooks are among ``hooks``."""
    from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _reconstruct_dtensor

    return any(hook is _localize_dtensor or hook is _reconstruct_dtensor for hook in hooks)


class ScalerOfOneProcess(torch.amp.GradScaler):
    """Torch's loss scaler with a say in what it found; ``unscale_`` and the fused optimizers' path both ask here."""

    def _share(self, optimizer: Optimizer, found_inf: dict[torch.device, torch.Tensor]) -> None:
        """Change in place what was found in the gradients of ``optimizer``, one 0-dim float a device."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        self._share(optimizer, found)
        return found
