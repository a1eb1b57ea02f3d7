"""Checks of the arguments of ``plan.apply``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.sources import SOURCES
from shard_spec.distributed.rank_state import RankState, group_or_default, raise_on_all_ranks
from shard_spec.estimate.roles import PIPELINE_AXIS_NAMES
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec


def group_of(mesh: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of all ranks of the mesh.

    Raises:
        PlanError: ``not-a-mesh``: the other ranks are told where ``group`` says who they are. ``rank-outside-mesh``,
            ``group-needed``, ``group-mismatch``: no rank was told, for nobody knows where the others are.
    """
    if not isinstance(mesh, DeviceMesh):
        found = f"{mesh!r:.200} of type {type(mesh).__qualname__}"
        hint = "give a DeviceMesh, from init_device_mesh or mesh_spec.to_device_mesh('cuda')"
        problem = Problem("not-a-mesh", "mesh", found=found, hint=hint)
        if group is not None:
            raise_on_all_ranks(group_or_default(group), RankState((), (problem,)), "apply")
        raise PlanError(problem)
    ranks = sorted(mesh.mesh.flatten().tolist())
    if mesh.get_coordinate() is None:
        found, hint = f"rank {dist.get_rank()} is not on the mesh of ranks {ranks}", "call it on ranks of the mesh only"
        raise PlanError(Problem("rank-outside-mesh", "mesh", found=found, hint=hint))
    if group is None and mesh.ndim == 1:
        return mesh.get_group()
    if group is None and len(ranks) == dist.get_world_size():
        return group_or_default(None)
    if group is None:
        found = f"a mesh of {mesh.ndim} axes over {len(ranks)} of {dist.get_world_size()} ranks"
        hint = "pass group=, a process group of all ranks of the mesh"
        raise PlanError(Problem("group-needed", "group", found=found, hint=hint))
    members = sorted(dist.get_process_group_ranks(group_or_default(group)))
    if members != ranks:
        found, hint = f"a group of ranks {members} for a mesh of ranks {ranks}", "pass the group of the mesh's ranks"
        raise PlanError(Problem("group-mismatch", "group", found=found, hint=hint))
    return group


def argument_problems(source: object, src_rank: object, size: int, init: object) -> list[Problem]:
    problems = []
    if source not in SOURCES:
        hint = f"one of {', '.join(map(repr, SOURCES))}"
        problems.append(Problem("unknown-source", "source", found=repr(source), hint=hint))
    if not isinstance(src_rank, int) or isinstance(src_rank, bool) or not 0 <= src_rank < size:
        hint = f"a rank in the group, 0 to {size - 1}"
        problems.append(Problem("src-rank-out-of-range", "src_rank", found=repr(src_rank), hint=hint))
    if init is not None and source != "meta":
        found, hint = f"init= with source={source!r}", "init fills meta tensors: use source='meta', or leave it out"
        problems.append(Problem("no-effect", "init", found=found, hint=hint))
    if not (init is None or init == "reset_parameters" or callable(init)):
        hint = "a function init(fqn, tensor), 'reset_parameters', or None"
        problems.append(Problem("unknown-init", "init", found=repr(init), hint=hint))
    return problems


def mesh_order_problems(mesh: DeviceMesh) -> list[Problem]:
    """Axes whose process group has another order than the mesh: gathers over it would be silently permuted."""
    problems = []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in range(mesh.ndim):
        index = tuple(slice(None) if at == axis else here for at, here in enumerate(coordinate))
        along = mesh.mesh[index].tolist()
        members = dist.get_process_group_ranks(mesh.get_group(axis))
        if along != members:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            found = f"ranks {along} along the axis, {members} in its process group"
            hint = "torch gathers in the order of the group: use ascending ranks, or DeviceMesh.from_group"
            problems.append(Problem("mesh-order", "mesh", axis=name, found=found, hint=hint))
    return problems


def pipeline_problems(mesh: DeviceMesh) -> list[Problem]:
    """Axes whose ranks hold different layers: a layout says which shard a rank holds, not that it holds none."""
    names = mesh.mesh_dim_names or ()
    hint = "apply one stage's plan on the mesh of that stage, mesh[the other axes]"
    found = "the stages of a pipeline hold different layers"
    axes = [axis for axis in names if axis in PIPELINE_AXIS_NAMES and mesh[axis].size() > 1]
    return [Problem("not-executable", "mesh", axis=axis, found=found, hint=hint) for axis in axes]


def value_problems(tensor: torch.Tensor, name: str, source: object, is_source: bool) -> list[Problem]:
    if tensor.is_meta and (source == "local" or (source == "scatter" and is_source)):
        hint = "load values first, or use source='meta'"
        return [Problem("meta-on-source", name, found="a meta tensor where values are needed", hint=hint)]
    return []


def on_mesh(layout: Layout, mesh: MeshSpec, name: str) -> Layout | Problem:
    """The same layout on the ranks of the live mesh: a plan is made for axes, whichever ranks they turn out to be."""
    same_axes = layout.mesh.axis_names == mesh.axis_names and layout.mesh.shape == mesh.shape
    from_spec = layout.mesh.ndim == mesh.ndim == 1 and tuple(layout.mesh.ranks) == tuple(mesh.ranks)
    if same_axes or from_spec:
        order = [mesh.axis_names[layout.mesh.axis_names.index(axis)] for axis in layout.order]
        return Layout(mesh, layout.specs, order)
    found = f"{layout} on the axes {layout.mesh} of ranks {list(layout.mesh.ranks)}; the mesh has {mesh}"
    hint = "give the plan the axes of the mesh, in its order"
    return Problem("mesh-mismatch", name, found=found, hint=hint)


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def source_text(source: object, src_rank: int, init: object, seed: int) -> str:
    if source == "scatter":
        return f"rank {src_rank} of the group"
    if source == "meta":
        how = getattr(init, "__qualname__", repr(init))
        return f"meta tensors filled by {how} with seed {seed}"
    return "every rank's own values"
