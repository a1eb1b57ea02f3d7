"""Sources of values for ``plan.apply``: one rank, every rank's own copy, or an initializer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_spec.apply.tensors import TensorAction
from shard_spec.distributed.exchange import broadcast_, scatter, take
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import ReplicateSpec

Source: TypeAlias = Literal["scatter", "local", "meta"]
Initializer: TypeAlias = Callable[[str, torch.Tensor], object]
SOURCES = ("scatter", "local", "meta")


def scatter_to_all(
    full: torch.Tensor | None,
    layout: Layout,
    action: TensorAction,
    device: torch.device,
    group: dist.ProcessGroup,
    src: int,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """Return this rank's shard: from ``src`` to each first replica, then broadcast along replicating axes.

    ``src`` sends every element once, for any number of replicas.
    """
    local = scatter(full, layout, action.shape, action.dtype, device, group, src, primaries=True)
    for axis, spec in enumerate(layout.specs):  # mesh order on all ranks
        if isinstance(spec, ReplicateSpec) and mesh.size(axis) > 1:
            broadcast_(local, mesh.get_group(axis), 0)
    return local


def local_shard(full: torch.Tensor, layout: Layout, device: torch.device, rank: int) -> torch.Tensor:
    """Copy this rank's shard; the full tensor can be freed afterwards."""
    return take(full, layout, rank).to(device).clone(memory_format=torch.contiguous_format)


# ---- meta -----------------------------------------------------------------------------------------------------------


def materialize(
    action: TensorAction,
    device: torch.device,
    rank: int,
    init: Initializer | None,
    seed: int,
) -> torch.Tensor:
    """Create this rank's shard of a meta tensor.

    Args:
        action: The tensor.
        device: Device of the shard.
        rank: Global rank.
        init: Fills a full tensor, ``init(fqn, tensor)``; None: floating shards become NaN, others 0.
        seed: Seed of the generators, with the FQN, for each tensor: the values depend neither on the layout nor on the
            rank.
    """
    assert action.layout is not None
    if init is None:
        local = torch.empty(action.layout.local_shape(rank, action.shape), dtype=action.dtype, device=device)
        return fill_nan_(local)
    full = fill_nan_(torch.empty(action.shape, dtype=action.dtype, device=device))  # unwritten entries show
    with seeded(seed, action.names[0], device), torch.no_grad():
        init(action.names[0], full)
    return local_shard(full, action.layout, device, rank)


def fill_nan_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, which cannot be mistaken for weights, or 0 for dtypes without NaN."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.zero_()


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed random numbers by ``seed`` and ``name`` alone; the generators are restored afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 63))
        yield
