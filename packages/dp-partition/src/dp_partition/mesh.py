"""Axes of a mesh: parameters on the last one, replicas along the first of two.

Messages to all ranks go over one axis after the other, the last one first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate


def shard_world(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)


def shard_rank(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank(mesh.ndim - 1)


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group(mesh.ndim - 1)  # shards are on the last axis


def num_replicas(mesh: DeviceMesh) -> int:
    """Return the number of replicas; 1 on a mesh of one axis."""
    return 1 if mesh.ndim == 1 else mesh.size(0)


def replica_group_name(mesh: DeviceMesh) -> str:
    """Return the name of the group of this rank's counterparts in all replicas. Empty on a mesh of one axis."""
    return "" if mesh.ndim == 1 else str(mesh.get_group(0).group_name)  # the graph names groups


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return a group for every axis, the last axis first."""
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]  # the same order on all ranks


def on_mesh(placement: Placement, mesh: DeviceMesh) -> list[Placement]:
    """Return placements on every axis for a placement on the last one."""
    return [Replicate()] * (mesh.ndim - 1) + [placement]


@dataclass(frozen=True)
class _Ranks:
    """Sizes of a mesh, and one rank of it."""

    sizes: tuple[int, ...]
    rank: int
    device_type: str

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int | None = None) -> int:
        return math.prod(self.sizes) if axis is None else self.sizes[axis]

    def get_local_rank(self, axis: int | None = None) -> int:
        below = math.prod(self.sizes[(axis or 0) + 1 :])  # ranks are row-major
        return self.rank // below % self.sizes[axis or 0]

    def get_group(self, axis: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(group_name=f"fake{axis or ''}")  # only its name is used, in the graph


def fake_mesh(world: int | tuple[int, ...], rank: int, device: str) -> DeviceMesh:
    """Return a mesh of ``world`` ranks (or sizes by axis), as seen by ``rank``. It cannot communicate."""
    return cast(DeviceMesh, _Ranks((world,) if isinstance(world, int) else world, rank, device))
