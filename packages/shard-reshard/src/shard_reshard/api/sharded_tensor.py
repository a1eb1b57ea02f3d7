"""Resharding of torch's ShardedTensor to a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from shard_spec.specs import (
    EnumerableShardingSpec,
    RemoteDevice,
    ShardingSpec,
    ShardMetadata,
    as_spec,
    from_torch,
    to_torch,
)

from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard._torch_compat import outside_of_graphs, sharded_tensor_types
from shard_reshard.api.reshard import reshard
from shard_reshard.execution.checks import Shards, as_list
from shard_reshard.group import group_info, raise_on_all_ranks


def reshard_sharded_tensor(st: Any, spec: Any) -> Any:
    """Reshard ``st`` to a new ShardedTensor under another sharding spec.

    Every rank of its process group calls. Works for several shards on a rank and for enumerable specs, unlike
    ``ShardedTensor.reshard``, and does not change ``st``.

    Args:
        st: A ``torch.distributed._shard.sharded_tensor.ShardedTensor``.
        spec: A chunk or enumerable spec, of shard-spec or of torch.

    Returns:
        A ``ShardedTensor`` in fresh memory.

    Raises:
        PlanError: On every rank alike, before any transfer.
    """
    kind, _ = sharded_tensor_types()
    if not isinstance(st, kind):
        raise refusal(
            "wrong-type",
            "st",
            found=type(st).__qualname__,
            hint="pass a ShardedTensor; reshard() takes local tensors, redistribute() DTensors",
        )
    metadata, group = st.metadata(), st._process_group
    try:
        wanted = _spec(spec, "spec")
    except PlanError as error:
        raise_on_all_ranks(group_info(group), error)
    shape, target = tuple(metadata.size), to_torch(wanted, tuple(metadata.size))
    # The tensor's metadata has the boxes, for any spec it was made from.
    held = EnumerableShardingSpec(list(map(from_torch, metadata.shards_metadata)))
    shards, _ = reshard_local_shard([shard.tensor for shard in st.local_shards()], shape, held, target, group)
    properties: Any = target
    new = properties.build_metadata(torch.Size(shape), metadata.tensor_properties)
    return kind._init_from_local_shards_and_global_metadata(shards, new, process_group=group, sharding_spec=target)


@dataclass
class LocalShard:
    """A shard on this rank.

    Attributes:
        tensor: Its data.
        metadata: Its box in the global tensor, and its device.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata


class RankNotPlaced(PlanError, RuntimeError):
    """The requested rank is in no placement."""


def get_idx_from_placements(placements: Sequence[Any], current_rank: int) -> int:
    """Return the position of the first placement on global rank ``current_rank``.

    Args:
        placements: Remote devices, torch's or shard-spec's, or their text (``"rank:0/cuda:0"``).
        current_rank: A global rank.

    Raises:
        RuntimeError: If no placement names the rank; also a `PlanError`.
    """
    for idx, placement in enumerate(placements):
        if RemoteDevice(placement).rank() == current_rank:
            return idx
    raise RankNotPlaced(
        Problem(
            "rank-outside-mesh",
            "current_rank",
            found=f"rank {current_rank}, the placements are {', '.join(str(RemoteDevice(p)) for p in placements)}",
            hint="name the rank in the placements",
        )
    )


def build_reshard_metadata(st_size: Sequence[int], sharding_spec: Any, world_size: int) -> tuple[list[Any], list[int]]:
    """Return the metadata of all shards of a spec, and their ranks.

    Args:
        st_size: Global shape.
        sharding_spec: A chunk or enumerable spec, or one of your own; of shard-spec or of torch.
        world_size: Number of ranks of the group; the spec may name fewer.

    Returns:
        The metadata of every shard ordered by rank (shards of one rank in the order of the spec), and the rank of
        every shard in the order of the spec. Metadata is torch's for a torch spec.

    Raises:
        PlanError: If the spec does not match the shape or names more ranks than ``world_size``.
    """
    shards = _spec(sharding_spec, "sharding_spec").shards_for(tuple(st_size))
    ranks = [shard.rank for shard in shards if shard.rank is not None]
    if len(set(ranks)) > world_size:
        raise refusal(
            "rank-outside-mesh",
            "sharding_spec",
            found=f"{len(set(ranks))} ranks, world_size={world_size}",
            hint="name fewer ranks",
        )
    ordered = sorted(shards, key=lambda shard: -1 if shard.rank is None else shard.rank)
    return ordered if isinstance(sharding_spec, ShardingSpec) else [to_torch(shard) for shard in ordered], ranks


def reshuffle_local_shard(
    local_shard: Shards, st_size: Sequence[int], sharding_spec: Any, resharding_spec: Any, pg: dist.ProcessGroup | None
) -> tuple[list[Any], list[Any]]:
    """Move shards to other ranks without a change of the sharded dim. Any permutation, any shards per rank.

    Arguments, result and errors as in `reshard_local_shard`, which handles every pair of specs.
    """
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)


@outside_of_graphs
def reshard_local_shard(
    local_tensor: Shards, st_size: Sequence[int], sharding_spec: Any, resharding_spec: Any, pg: dist.ProcessGroup | None
) -> tuple[list[Any], list[Any]]:
    """Reshard from one spec to another. Differentiable; ``local_tensor`` is not changed.

    Args:
        local_tensor: This rank's shard; a list for several, None or an empty tensor for none.
        st_size: Global shape.
        sharding_spec: Spec of the source: of shard-spec or of torch. Placements name global ranks.
        resharding_spec: Spec of the result.
        pg: A group of the ranks of both specs; every member calls.

    Returns:
        This rank's shards (none if the new spec does not name it), and all shards' metadata ordered by rank. They are
        torch's ``Shard`` and ``ShardMetadata`` if ``resharding_spec`` is torch's, else `LocalShard` and shard-spec's
        ``ShardMetadata``.

    Raises:
        PlanError: On every rank alike, before any transfer.
    """
    moved = reshard(local_tensor, sharding_spec, resharding_spec, shape=tuple(st_size), group=pg)
    members = group_info(pg)
    metadata, _ = build_reshard_metadata(st_size, resharding_spec, members.size)
    own = [entry for entry in metadata if entry.placement.rank() == members.global_ranks[members.rank]]
    make: Any = LocalShard if isinstance(resharding_spec, ShardingSpec) else sharded_tensor_types()[1]
    return [make(tensor, entry) for tensor, entry in zip(as_list(moved), own, strict=False)], metadata


def _spec(given: Any, name: str) -> ShardingSpec:
    spec = as_spec(given)
    if spec is None:
        raise refusal(
            "wrong-type",
            name,
            found=f"{given!r}",
            hint="a ChunkShardingSpec, an EnumerableShardingSpec or another ShardingSpec, of shard-spec or torch",
        )
    return spec
