"""State dicts of parallel models: global at the boundary, whatever stands in the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.sharding_info import ShardingInfo
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.keep import check_parts
from tp_styles.runtime.parameters import contiguous_stride
from tp_styles.runtime.parts import PartTensor
from tp_styles.runtime.shard_parameter import ShardParameter, split_of


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the unsharded model would have, on every rank; every rank calls it.

    Args:
        model: A model with parallel modules.

    Returns:
        Plain tensors under unchanged names.

    Raises:
        PlanError: A rank has no state dict, or one of other entries; on every rank.
    """
    state: dict[str, Any] = {}
    fault = None
    try:
        state = model.state_dict()
    except Exception as error:
        fault = error
    divided = [f"{name}: {list(v.shape)} {v.dtype}" for name, v in state.items() if isinstance(v, DTensor | PartTensor)]
    for mesh in _meshes(model):
        try:
            assert_consistent(mesh, "full_state_dict", divided, fault, hint="every rank needs the same parameters")
        except Exception as error:  # ranks of the other meshes have to raise, too
            fault = error
    if fault is not None:
        raise fault
    return {name: whole(value) for name, value in state.items()}


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    """Over which the model's parameters are divided, in their order."""
    found: dict[DeviceMesh, None] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            found[parameter.device_mesh] = None
        elif isinstance(parameter, ShardParameter):
            found[parameter._sharding_info.mesh] = None
    return list(found)


def whole(value: Any) -> Any:
    """The global tensor of a state-dict entry; other entries as they are."""
    if isinstance(value, DTensor | PartTensor):
        return value.full_tensor()
    return value


class GlobalOnSave:
    """State-dict hook: local parameters leave as DTensors, or as `PartTensor`s where a DTensor cannot say it.

    Nothing is communicated and no memory copied.

    Args:
        names: The module's parameters that styles divide.
        local: Those of them that are plain tensors.
    """

    def __init__(self, names: tuple[str, ...], local: tuple[str, ...]) -> None:
        self.names = names
        self.local = local

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace this module's entries.

        Raises:
            PlanError: A local parameter was replaced by one that does not know what it is a part of.
        """
        check_parts(module, self.local, prefix.removesuffix("."))
        for name in self.names:
            parameter = module._parameters.get(name)
            value = state.get(prefix + name)
            if not isinstance(parameter, ShardParameter) or isinstance(value, nn.Parameter | DTensor):
                continue  # `keep_vars=True` gets the parameters themselves
            if isinstance(value, torch.Tensor):
                state[prefix + name] = global_view(value, parameter)


class LocalOnLoad:
    """Load hook: takes DTensors of any layout, `PartTensor`s and whole tensors."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace this module's entries by what stands in the module."""
        for name in self.names:
            parameter, value = module._parameters.get(name), state.get(prefix + name)
            if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor | ShardParameter):
                state[prefix + name] = _as_parameter(value, parameter, prefix + name)


def global_view(local: torch.Tensor, parameter: ShardParameter) -> torch.Tensor:
    """The local tensor with what it is a part of."""
    info = parameter._sharding_info
    if info.sections:
        return PartTensor.of(local, info)
    mesh, placements, shape, stride, _ = info
    return DTensor.from_local(local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _as_parameter(value: torch.Tensor, parameter: nn.Parameter, key: str) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        if isinstance(value, DTensor) and value.device_mesh == mesh and value.shape == shape:
            # `assign=True` would put another layout in the module, whose forward takes a part
            return value if value.placements == placements else value.redistribute(placements=placements)
        if isinstance(value, DTensor) and mesh.ndim > 1:
            return value  # FSDP2's, on a mesh of two dims: torch's own loading compares
        local = _cut(value, ShardingInfo(mesh, placements, shape, parameter.stride()), key)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
        )
    assert isinstance(parameter, ShardParameter)
    if isinstance(value, ShardParameter):
        return value
    loaded = ShardParameter(_cut(value, parameter._sharding_info, key), parameter.requires_grad)
    loaded.__dict__.update(parameter.__dict__)
    return loaded


def _cut(value: torch.Tensor, info: ShardingInfo, key: str) -> torch.Tensor:
    """This rank's part of an entry; communicates only if it lies otherwise."""
    mesh, placements, shape = info.mesh, info.placements, info.shape
    if isinstance(value, PartTensor):
        if value._sharding_info == info:
            return value.plain()
        value = value.full_tensor()
    if isinstance(value, DTensor):
        if not info.sections and value.device_mesh == mesh and value.shape == shape:
            return value.redistribute(placements=placements).to_local()
        value = value.full_tensor()
    if value.shape != shape:
        raise PlanError(
            Problem(
                "state-shape",
                key,
                found=f"shape {tuple(value.shape)}",
                hint=f"the whole tensor has {tuple(shape)}; pass it, a DTensor, or what state_dict() gave",
            )
        )
    return split_of(info).take(value, mesh.get_local_rank(), mesh.size())
