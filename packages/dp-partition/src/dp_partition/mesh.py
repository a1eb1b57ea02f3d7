"""Axes of a mesh: parameters lie on the last one, a mesh of two axes has replicas of them along the first.

What is sent to all ranks goes over one axis after the other, the last one first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

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


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """A group for every axis, the last axis first."""
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


def on_mesh(placement: Placement, mesh: DeviceMesh) -> list[Placement]:
    """A placement on the last axis as placements on every axis."""
    return [Replicate()] * (mesh.ndim - 1) + [placement]


@dataclass(frozen=True)
class _Group:
    group_name: str


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
        below = math.prod(self.sizes[(axis or 0) + 1 :])
        return self.rank // below % self.sizes[axis or 0]

    def get_group(self, axis: int | None = None) -> _Group:
        return _Group(f"fake{axis or ''}")


def fake_mesh(world: int | tuple[int, ...], rank: int, device: str) -> DeviceMesh:
    """A mesh of ``world`` ranks, or of as many along each axis, as rank ``rank`` sees it. It cannot communicate."""
    return cast(DeviceMesh, _Ranks((world,) if isinstance(world, int) else world, rank, device))
