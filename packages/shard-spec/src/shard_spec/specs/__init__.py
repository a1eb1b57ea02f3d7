"""Sharding specs of single tensors. Terms are those of ``torch.distributed._shard``. Torch's own are taken too."""

from shard_spec.specs.base import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    as_spec,
    from_torch,
    to_torch,
)
from shard_spec.specs.shards import DeviceLike, RemoteDevice, Sharder, ShardMetadata, TensorShards

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "ShardMetadata",
    "Sharder",
    "ShardingSpec",
    "RemoteDevice",
    "DeviceLike",
    "TensorShards",
    "from_torch",
    "to_torch",
    "as_spec",
]
