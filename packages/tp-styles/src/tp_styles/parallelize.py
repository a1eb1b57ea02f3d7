"""`parallelize_module`: the common entry of the first styles and today's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._torch_compat import TorchParallelStyle, current_mesh
from tp_styles.apply import apply_staged
from tp_styles.problems import PlanError, Problem


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: TorchParallelStyle | Mapping[str, TorchParallelStyle] | None = None,
    tp_mesh_dim: int = 0,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module tensor parallel, in place, and return it. `apply_plan` does the same and returns a handle.

    Args:
        module: The module.
        device_mesh: The mesh; by default that of the innermost `with mesh:` block.
        parallelize_plan: One style for the module, or FQN pattern -> style; patterns without a module are an error.
        tp_mesh_dim: Tensor-parallel dim of a mesh with several.
        src_data_rank: Group rank with the source values; None takes each rank's own.

    Raises:
        PlanError: All problems of the plan, before any change; on every rank, if there is one
            on any.
    """
    device_mesh = device_mesh if device_mesh is not None else current_mesh()
    mesh = None if device_mesh is None else one_dim(device_mesh, tp_mesh_dim)
    if parallelize_plan is None:
        if mesh is not None:  # another rank may have a plan
            apply_staged(module, mesh, {}, src_data_rank)
        warnings.warn("parallelize_module without a parallelize_plan changes nothing", stacklevel=2)
        return module
    if mesh is None:
        raise PlanError(
            Problem("missing-mesh", "device_mesh", found="None", hint="pass a mesh, or call it inside of `with mesh:`")
        )
    apply_staged(module, mesh, parallelize_plan, src_data_rank)
    return module


def one_dim(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Return one dim of a mesh as a 1-D mesh over this rank's group; makes no new process group.

    Raises:
        PlanError: The mesh has no such dim.
    """
    if mesh.ndim == 1:
        return mesh
    if not -mesh.ndim <= dim < mesh.ndim:
        raise PlanError(
            Problem("invalid-mesh", "tp_mesh_dim", found=str(dim), hint=f"the mesh has {mesh.ndim} dims: {mesh}")
        )
    dim %= mesh.ndim
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[dim]]  # stays a slice of its root mesh
    return DeviceMesh.from_group(mesh.get_group(dim), mesh.device_type)
