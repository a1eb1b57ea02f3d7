"""From a tensor-parallel module to a DDP in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ddp_bridge._torch_compat import flatten_axes
from tp_ddp_bridge.axes import AxisRanks, data_axes, mixing_problems
from tp_ddp_bridge.ddp import BridgedDDP
from tp_ddp_bridge.optimizers import as_list
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.replicas import check_replicas, check_same_shards
from tp_ddp_bridge.survey import Survey, survey
from tp_ddp_bridge.transform import (
    is_bridged,
    pre_dp_module_transform,
    raise_what_is_in_the_way,
    undo_dp_transform,
)


def wrap_ddp(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    **ddp_kwargs: Any,
) -> DistributedDataParallel:
    """Bridge ``module`` and wrap it in ``DistributedDataParallel`` over the ranks that hold the same shards.

    Before DDP broadcasts anything, the ranks compare what they hold: members of the data-parallel group must hold the
    same shards, and parameters that are whole on tensor-parallel ranks must be equal there, bit for bit.

    Args:
        module: A tensor-parallel module, bridged or not.
        mesh: A mesh with the data axis: the 2-D mesh that the tensor-parallel mesh was sliced from, or the data axis
            alone. All axes that no parameter lies on are data axes (several are flattened into one).
        group: Instead of ``mesh``, the process group of ranks that hold the same shards.
        optimizers: As in ``pre_dp_module_transform``.
        **ddp_kwargs: Passed to ``DistributedDataParallel`` as they are.

    Returns:
        The DDP. Its state dict has DTensors of global shape.

    Raises:
        PlanError: Everything that is in the way, on all ranks alike. Nothing was changed and nothing was broadcast.
        TypeError: A DDP argument that names the group another way.
    """
    _check_arguments(mesh, group, ddp_kwargs)
    seen, listed = survey(module), as_list(optimizers)
    raise_what_is_in_the_way(seen, listed)
    data_group = _data_group(seen, mesh, group)
    check_same_shards(module, data_group)
    for tensor_group in _tensor_groups(seen):
        check_replicas(module, tensor_group)
    bridged_before = is_bridged(module)
    pre_dp_module_transform(module, optimizers=listed)
    try:
        return BridgedDDP(module, process_group=data_group, **ddp_kwargs)
    except Exception:
        if not bridged_before:
            undo_dp_transform(module, optimizers=listed)
        raise


def _check_arguments(mesh: DeviceMesh | None, group: dist.ProcessGroup | None, ddp_kwargs: dict[str, Any]) -> None:
    for name in ("process_group", "device_mesh"):
        if name in ddp_kwargs:
            raise TypeError(f"wrap_ddp() takes the data-parallel ranks as mesh= or group=, not as {name}=")
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            Problem(
                "no-process-group",
                "wrap_ddp",
                found="torch.distributed is not initialized",
                hint="init_process_group first",
            )
        )
    if (mesh is None) == (group is None):
        given = "neither of them" if mesh is None else "both"
        raise PlanError(
            Problem(
                "no-data-group" if mesh is None else "two-data-groups",
                "mesh, group",
                found=f"{given} is given",
                hint="say which ranks are data parallel: mesh= with a data axis (the 2-D mesh), or group=, one of them",
            )
        )


def _tensor_ranks(seen: Survey) -> dict[str, frozenset[int]]:
    """For every laid out tensor the ranks that hold parts or copies of it together with this rank."""
    return {found.name: frozenset(found.layout.mesh.mesh.flatten().tolist()) for found in seen.laid_out}


def _data_group(seen: Survey, mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    rank = dist.get_rank()
    tensor_ranks = _tensor_ranks(seen)
    if mesh is None:
        assert group is not None
        problems = mixing_problems(rank, frozenset(dist.get_process_group_ranks(group)), tensor_ranks)
        if problems:
            raise PlanError(problems, "the data-parallel group mixes with tensor parallelism")
        return group
    if mesh.get_coordinate() is None:
        raise PlanError(
            Problem(
                "outside-mesh", "mesh", found=f"rank {rank} is not in it", hint="call wrap_ddp on the mesh's ranks only"
            )
        )
    named = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    members = [frozenset(dist.get_process_group_ranks(mesh.get_group(index))) for index in range(mesh.ndim)]
    names, found = data_axes(rank, map(AxisRanks, named, members), tensor_ranks)
    if len(names) > 1 and mesh.mesh_dim_names is None:
        found += (
            Problem("unnamed-axes", "mesh", found=f"{len(names)} data axes", hint="give the mesh mesh_dim_names"),
        )
    if found:
        raise PlanError(found, "the mesh does not tell data from tensor parallelism")
    if len(names) > 1:
        return flatten_axes(mesh, names).get_group()
    return mesh.get_group(named.index(names[0]))


def _tensor_groups(seen: Survey) -> list[dist.ProcessGroup]:
    """Every group of several ranks along an axis of a laid out tensor's mesh, in the order of tensors and axes."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for found in seen.laid_out:
        mesh = found.layout.mesh
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in groups.items() if len(ranks) > 1]
