"""Redistribution of DTensors from any mesh to any mesh, in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shard_reshard._shared.dtensor import as_dtensor
from shard_reshard._shared.problems import PlanError, refusal
from shard_reshard._torch_compat import dtensor_maker, mesh_groups, outside_of_graphs, real_tensors
from shard_reshard.api.reshard import find_mover, move
from shard_reshard.execution.mover import Mover, schedules
from shard_reshard.group import group_info, raise_on_all_ranks


@outside_of_graphs
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
) -> DTensor:
    """Redistribute a DTensor to placements on the same mesh or on another one.

    One exchange with the fewest bytes, for any number of axes. ``DTensor.redistribute`` moves axis by axis and ignores
    another mesh. Gradients come back in the source's placements, as with DTensor's own.

    Args:
        dtensor: The source. Ranks outside of its mesh pass their DTensor, which is empty.
        device_mesh: The destination mesh.
        placements: One for each of its axes.
        group: A group of the ranks of both meshes; every member calls. None: the mesh's own group if it is one, else
            the default group, which then may hold no other ranks.

    Returns:
        A new DTensor on ``device_mesh``, its local tensor in fresh memory.

    Raises:
        PlanError: On every rank alike, before any transfer, at the first call of a kind. A rank that passes no DTensor,
            no mesh or a group of another type raises alone, since its peers are unknown.
    """
    expected_types: dict[str, tuple[Any, Any, str]] = {
        "dtensor": (dtensor, DTensor, "pass a DTensor; a local tensor goes to reshard(tensor, src, dst)"),
        "device_mesh": (device_mesh, DeviceMesh, "pass the destination's DeviceMesh"),
        "group": (group, dist.ProcessGroup | None, "pass a process group, as mesh.get_group('tp') returns it"),
    }
    for name, (value, kind, hint) in expected_types.items():
        if not isinstance(value, kind):
            raise refusal("wrong-type", name, found=f"a {type(value).__name__}", hint=hint)
    try:
        listed: Any = placements  # of any type
        if not isinstance(listed, Sequence) or not all(isinstance(p, Placement) for p in listed):
            raise refusal(
                "wrong-type",
                "placements",
                found=repr(placements),
                hint="pass placements, such as [Shard(0)], one for each axis",
            )
        ndim = dtensor.dim()  # dims are counted from the front, as in DTensor itself
        placements = tuple(
            [Shard(p.dim + ndim) if isinstance(p, Shard) and -ndim <= p.dim < 0 else p for p in placements]
        )
    except PlanError as error:
        raise_on_all_ranks(group_info(group or _union_group(dtensor.device_mesh, device_mesh)), error)
    moved = _Redistribute.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        dtensor, device_mesh, placements, group
    )
    assert isinstance(moved, DTensor)
    return moved


class _Route(NamedTuple):
    """Mover and output of repeated calls with one kind of DTensor."""

    mover: Mover
    holds_source: bool  # True if this rank is in the source's mesh
    make: list[Callable[[torch.Tensor], DTensor]]  # constructor of the result; set by the first call


class _Redistribute(torch.autograd.Function):
    """Redistribute with DTensor's own gradients: a replicated gradient is one value and is not summed."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, mesh: DeviceMesh, placements: Any, group: Any) -> DTensor:
        ctx.mesh, ctx.placements, ctx.group = dtensor.device_mesh, dtensor.placements, group
        source, shape = (dtensor.device_mesh, dtensor.placements), dtensor.shape
        # Groups are in the key: meshes of equal ranks are equal, even if one gathers in another order.
        groups = mesh_groups(source[0]), mesh_groups(mesh), group is None
        key = *source, mesh, placements, shape, dtensor.dtype, groups
        owner: Any = group or dist.group.WORLD
        route: _Route | None = None if owner is None else schedules.entries["call"].get(owner, {}).get(key)
        if route is None:
            there = dtensor.device_mesh.get_coordinate() is not None
            tensors = [dtensor.to_local()] if there else []  # outside ranks hold an empty one
            members, target = group_info(group or _union_group(source[0], mesh)), (mesh, placements)
            mover, _ = find_mover(members, tensors, source, target, shape, dtype=dtensor.dtype)
            route = _Route(mover, there, [])
            schedules.put(owner, "call", key, route)
        local = dtensor.to_local()
        moved = move(route.mover, local if route.holds_source else None, None, False)
        if moved is None:  # outside of the destination mesh
            moved = torch.empty(0, dtype=dtensor.dtype, device=local.device)
        if not route.make:
            route.make.append(dtensor_maker(as_dtensor(moved, mesh, placements, shape)))
        return route.make[0](moved)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        ops = {p.reduce_op for p in ctx.placements if isinstance(p, Partial)}
        if ops - {"sum", "avg"}:
            raise refusal(
                "not-differentiable",
                "src",
                found=f"a reduction by {', '.join(sorted(ops))}",
                hint="detach() the tensor; gradients flow through sums and averages",
            )
        # A contributor to a sum has the gradient of the sum, equal on its ranks; a contributor to an average its share.
        back = tuple(Replicate() if isinstance(p, Partial) else p for p in ctx.placements)
        averaged = prod(
            size
            for size, p in zip(ctx.mesh.shape, ctx.placements, strict=True)
            if isinstance(p, Partial) and p.reduce_op == "avg"
        )
        moved = redistribute(grad, ctx.mesh, back, group=ctx.group)
        return (moved / averaged if averaged > 1 else moved), None, None, None


def _union_group(src: DeviceMesh, dst: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of exactly the ranks of both meshes."""
    with real_tensors():  # plain numbers, even under fake tensors
        wanted = {rank for mesh in (src, dst) for rank in mesh.mesh.flatten().tolist()}
    candidates = [mesh.get_group() for mesh in (src, dst) if mesh.ndim == 1 and mesh.get_coordinate() is not None]
    for group in candidates:
        if set(dist.get_process_group_ranks(group)) == wanted:
            return group
    world = group_info(None)
    if set(world.global_ranks) == wanted:
        return world.group
    raise refusal(
        "no-process-group",
        "group",
        found=f"meshes over {len(wanted)} of {world.size} ranks",
        hint="pass group=, a process group of exactly those ranks",
    )
