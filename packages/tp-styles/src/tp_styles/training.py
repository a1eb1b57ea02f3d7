"""The full state dict of a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_styles._shared.consensus import assert_consistent, capture_errors
from tp_styles._shared.sectioned_tensor import is_sectioned
from tp_styles.runtime.parameters import ShardParameter


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsharded model, on every rank; every rank calls it.

    Args:
        model: A model with parallel modules.

    Returns:
        Plain tensors under unchanged names.

    Raises:
        PlanError: A rank has no state dict, or other entries; on every rank.
    """
    present, fault = capture_errors(model.state_dict)  # an error is raised below, on all ranks
    state: dict[str, Any] = present or {}
    sharded = {name: value for name, value in state.items() if isinstance(value, DTensor) or is_sectioned(value)}
    divided = [f"{name}: {list(value.shape)} {value.dtype}" for name, value in sharded.items()]
    for mesh in _meshes(model):
        try:
            assert_consistent(mesh, "full_state_dict", divided, fault, hint="every rank needs the same parameters")
        except Exception as error:  # ranks of the other meshes must raise too
            fault = error
    if fault is not None:
        raise fault
    return {name: sharded[name].full_tensor() if name in sharded else value for name, value in state.items()}


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the meshes of the model's sharded parameters."""
    meshes = [
        parameter.device_mesh if isinstance(parameter, DTensor) else parameter._sharding_info.mesh
        for parameter in model.parameters()
        if isinstance(parameter, DTensor | ShardParameter)
    ]
    return list(dict.fromkeys(meshes))  # ordered, so ranks use them in one order
