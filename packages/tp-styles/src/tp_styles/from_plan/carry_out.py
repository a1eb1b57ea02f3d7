"""`apply_sharding_plan`: a plan carried out on every axis of its mesh, tensor parallel and data parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tp_styles import _torch_compat
from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.apply import apply_plan
from tp_styles.from_plan.convert import from_sharding_plan
from tp_styles.problems import PlanError, Problem

if TYPE_CHECKING:
    from shard_spec import Layout, ShardingPlan
    from torch.distributed.device_mesh import DeviceMesh

    from tp_styles.check.checker import Check
    from tp_styles.styles.base import ParallelStyle

# Axes along which ranks see different samples, by the names that shard_spec's estimates take for such, too.
_DATA_AXES = frozenset(
    {"dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "dp_replicate", "dp_shard", "dp_shard_cp", "batch"}
)


def apply_sharding_plan(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, check: Check = "first") -> nn.Module:
    """Make a model train as a `shard_spec.ShardingPlan` says, in place; every rank calls it.

    Its model axis is carried out by `from_sharding_plan` and `apply_plan`, a data axis that shards by `fully_shard`
    (each child of a `ModuleList`, then the rest), one that only replicates by torch's `replicate`. Inputs stay plain
    tensors: equal along the model axis, each rank's own along data axes, over which gradients are averaged.

    Args:
        model: The model, with equal values on all ranks.
        mesh: The mesh of the plan, with its axis names.
        plan: Any plan with at most one model axis, one data axis that shards, and before it one that replicates.
        check: As in `apply_plan`.

    Returns:
        The model.

    Raises:
        PlanError: Before anything is changed: `plan-not-executable`, and what `from_sharding_plan` and
            `apply_plan` refuse. Afterwards: `layout-mismatch`, where a parameter lies otherwise than planned.
    """
    names = mesh.mesh_dim_names or ()
    layouts: dict[str, Layout] = {}
    styles: dict[str, dict[str, ParallelStyle]] = {}
    digest, fault = "", None
    try:
        digest = plan.digest
        layouts, styles = _decided(model, mesh, plan)
    except Exception as error:  # raised below, together with all ranks: the others would wait in `apply_plan`
        fault = error
    assert_consistent(mesh, "apply_sharding_plan", (digest, *sorted(styles)), fault)
    sharding = {axis for layout in layouts.values() for axis in names if _dim(layout, axis) is not None}
    data = tuple(axis for axis in names if axis in _DATA_AXES and mesh[axis].size() > 1)
    for axis in names:
        if axis in styles:
            handle = apply_plan(model, mesh[axis], styles[axis], check=check)
            local = [name for name, p in model.named_parameters() if sharding_info_of(p) is not None]
            if local and sharding & set(data):
                # FSDP2 would take a local shard for the full parameter, and a checkpoint would say so.
                handle.undo()
                hint = "use DistributedDataParallel (tp_ddp_bridge), or plan without kv copies and fused order"
                text = "a shard that no DTensor describes cannot be sharded again by FSDP2"
                raise PlanError([Problem("plan-not-executable", name, found=text, hint=hint) for name in local])
    if data:
        # By identity: FSDP2 asks for the dim of a parameter before it replaces it, and knows no names.
        found = {id(p): [_dim(layouts[name], axis) for axis in data] for name, p in model.named_parameters()}
        dims = {key: next((dim for dim in dims if dim is not None), 0) for key, dims in found.items()}
        for block in [*_repeated_blocks(model), model]:
            if sharding & set(data):
                fully_shard(block, mesh=mesh[data], shard_placement_fn=lambda p: Shard(dims[id(p)]))
            else:
                _torch_compat.replicate(block, mesh[data[0]])
    _compare(model, layouts)
    return model


def _decided(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan
) -> tuple[dict[str, Layout], dict[str, dict[str, ParallelStyle]]]:
    """Return each parameter's layout, and the styles along each model axis; sends and changes nothing."""
    names, resolution = mesh.mesh_dim_names or (), plan.resolve(model)
    layouts: dict[str, Layout] = {name: resolution[name] for name, _ in model.named_parameters()}
    problems = _axis_problems(names, mesh, layouts)
    if problems:
        raise PlanError(problems, "the plan cannot be carried out on this mesh:")
    sharding = [axis for axis in names if any(_dim(layout, axis) is not None for layout in layouts.values())]
    model_axes = [axis for axis in sharding if axis not in _DATA_AXES]
    return layouts, {axis: from_sharding_plan(plan, model, axis=axis) for axis in model_axes}


def _axis_problems(names: tuple[str, ...], mesh: DeviceMesh, layouts: dict[str, Layout]) -> list[Problem]:
    """Why the axes of a plan have no counterpart in torch and the styles; empty where they have."""
    problems: list[Problem] = []
    for name, layout in layouts.items():
        if tuple(layout.mesh.axis_names) != tuple(names) or layout.mesh.shape != tuple(mesh.shape):
            found, hint = f"{layout.mesh}; the mesh has {names} of {tuple(mesh.shape)}", "plan for the axes of the mesh"
            return [Problem("mesh-mismatch", name, found=found, hint=hint)]
    sharding = [axis for axis in names if any(_dim(layout, axis) is not None for layout in layouts.values())]
    data = [axis for axis in names if axis in _DATA_AXES and mesh[axis].size() > 1]
    model, shards = [a for a in sharding if a not in _DATA_AXES], [a for a in data if a in sharding]
    replicates = [axis for axis in data if axis not in sharding]
    if len(model) > 1 or len(shards) > 1 or len(replicates) > 1 or [*replicates, *shards] != data:
        found = f"model axes {model}, data axes that shard {shards} and that replicate {replicates}"
        hint = "one model axis, one data axis that shards, and one that replicates before it"
        problems.append(Problem("plan-not-executable", "mesh", found=found, hint=hint))
    for name, layout in layouts.items() if shards else ():
        if layout.specs[names.index(shards[0])].kind != "S":
            found = f"{layout}: fully_shard shards every parameter along {shards[0]!r}"
            hint = "plan with FullyShardPlanner(uneven='shard', min_bytes=0)"
            problems.append(Problem("plan-not-executable", name, axis=shards[0], found=found, hint=hint))
    return problems


def _compare(model: nn.Module, layouts: dict[str, Layout]) -> None:
    """Compare what this rank holds of each parameter with the plan.

    Raises:
        PlanError: ``layout-mismatch``.
    """
    from shard_spec import layout_of_tensor

    problems, rank = [], dist.get_rank()
    for name, parameter in model.named_parameters():
        real, planned = layout_of_tensor(parameter), layouts[name]
        shape = _global_shape(parameter)
        if real is None:
            agrees = planned.is_replicated
        else:
            agrees = real.boxes(rank, shape) == planned.boxes(rank, shape)
        if not agrees:
            found = f"{real or 'the full tensor'} on rank {rank}, planned is {planned}"
            problems.append(Problem("layout-mismatch", name, found=found, hint="report this: the plan was accepted"))
    if problems:
        raise PlanError(problems, "parameters lie otherwise than planned:")


def _global_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the global shape of a parameter, also of a local shard."""
    info = sharding_info_of(parameter)
    return tuple(parameter.shape if info is None else info.shape)


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of the outermost `ModuleList`s of several modules, in order."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    inner = {id(below) for each in lists for child in each for below in child.modules() if below is not child}
    return [child for each in lists if id(each) not in inner for child in each]


def _dim(layout: Layout, axis: str) -> int | None:
    dim: int | None = layout.specs[layout.mesh.axis_index(axis)].dim
    return dim
