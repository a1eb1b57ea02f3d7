"""The axes of a mesh. Parameters lie on the last one; a mesh of two axes has replicas of them along the first.

Whatever is said or sent to all ranks goes over one axis after the other, the last one first.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate


def shard_world(mesh: DeviceMesh) -> int:
    """Number of ranks that parameters lie on."""
    return mesh.size(mesh.ndim - 1)


def shard_rank(mesh: DeviceMesh) -> int:
    """This rank's place among them."""
    return mesh.get_local_rank(mesh.ndim - 1)


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Their process group."""
    return mesh.get_group(mesh.ndim - 1)


def num_replicas(mesh: DeviceMesh) -> int:
    """Number of replicas; 1 on a mesh of one axis."""
    return 1 if mesh.ndim == 1 else mesh.size(0)


def replica_group_name(mesh: DeviceMesh) -> str:
    """Name of the group of this rank's counterparts in all replicas; empty on a mesh of one axis."""
    return "" if mesh.ndim == 1 else str(mesh.get_group(0).group_name)


def flat_rank(mesh: DeviceMesh) -> int:
    """This rank's place among all ranks of the mesh."""
    outer = 0 if mesh.ndim == 1 else mesh.get_local_rank(0)
    return outer * shard_world(mesh) + shard_rank(mesh)


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """A group for every axis, the last axis first."""
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


def on_mesh(placement: Placement, mesh: DeviceMesh) -> list[Placement]:
    """A placement on the last axis as placements on every axis."""
    return [Replicate()] * (mesh.ndim - 1) + [placement]


def gather_objects(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    found = [value]
    for group in all_groups(mesh):
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, found, group=group)
        found = [one for row in rows for one in row]
    return found


def first_ranks(mesh: DeviceMesh, value: Any) -> Any:
    """The first rank's object, on every rank."""
    box = [value]
    if mesh.size() == 1:
        return value
    for group in all_groups(mesh):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


__all__ = [
    "all_groups",
    "first_ranks",
    "flat_rank",
    "gather_objects",
    "num_replicas",
    "on_mesh",
    "replica_group_name",
    "shard_group",
    "shard_rank",
    "shard_world",
]
