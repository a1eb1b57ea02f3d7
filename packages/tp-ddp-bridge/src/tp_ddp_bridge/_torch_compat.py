"""Private names of torch used in this package.

Read against torch 2.13.0; the same names exist in 2.11.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

GRAD_HOOKS, POST_ACCUMULATE_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
"""Attributes with the dicts that a tensor's hooks are registered in; handles remove from these very dicts."""
Function = _SingleLevelFunction
"""``torch.autograd.Function`` without its Python ``apply``, which looks for functorch's transforms first (1 us)."""
WEIGHT_NORMS = (_WeightNorm, WeightNorm)  # a parametrization, and the hook of the deprecated function


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the metadata of a DTensor, without a tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    """Return a DTensor around ``local``; ``spec`` may be shared, operators give their results another one."""
    # DTensor.__init__ is empty, behind two wrappers as expensive as the constructor.
    wrapped: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    return wrapped


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of ``tensor``, waited for; no autograd."""
    local: Any = tensor._local_tensor
    arrived: torch.Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return arrived


def reduced_parameters(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters DDP was built with, trainable or not, without ignored ones."""
    parameters: list[torch.Tensor] = ddp._module_parameters
    return parameters


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Return True if a forward runs within ``join()``: other ranks may run none then."""
    enabled: bool = ddp._join_config.enable
    return enabled


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the communication hooks of a DDP with their states."""
    hooks: list[tuple[Callable[..., Any], object]] = getattr(ddp, "_comm_hooks", [])
    return hooks


def default_axis_order(tensor: DTensor) -> bool:
    """Return True if axes on one dim shard it in mesh order, as ``from_local`` assumes."""
    spec = tensor._spec
    order: Any = getattr(spec, "shard_order", None)  # absent in 2.11 builds without ordered shards
    return order is None or bool(DTensorSpec.is_default_device_order(order))


def is_transformed() -> bool:
    """Return True within a transform of ``torch.func``."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def top_saved_tensors_hooks() -> object:
    """Return the innermost pack hook, ``None`` without any: a checkpointed region has its own."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over several axes of ``mesh``."""
    return mesh[axes]._flatten()


def torch_bridged(module: nn.Module) -> bool:
    """Return True if torch's own ``_pre_dp_module_transform`` ran: it leaves a hook to swap DTensors in."""
    from torch.distributed.tensor.parallel.ddp import _reconstruct_dtensor

    return _reconstruct_dtensor in module._forward_pre_hooks.values()


class LocalGradScaler(torch.amp.GradScaler):
    """Torch's loss scaler, with a method for the verdict of ``unscale_`` and of fused optimizers."""

    def _reduce_found_inf(self, optimizer: Optimizer, found_inf: dict[torch.device, torch.Tensor]) -> None:
        """Change the verdict on the gradients of ``optimizer`` in place, one 0-dim float a device."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        self._reduce_found_inf(optimizer, per_device)
        return per_device
