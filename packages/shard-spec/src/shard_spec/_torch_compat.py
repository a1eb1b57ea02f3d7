"""The one place where this package touches what torch keeps under an underscore.

Read against torch 2.13.0; the names below also stand in 2.11.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def strided_shard_factor(placement: object) -> int | None:
    """The split factor of a DTensor strided shard, or None when ``placement`` is something else."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """DTensor's strided shard: the dim is cut into ``split_factor`` sections and each section is sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard

    made: Any = _StridedShard(dim, split_factor=split_factor)
    return made  # type: ignore[no-any-return]  # the class is untyped in torch


# ---- torch.distributed._shard: specs and sharders of the caller -------------------------------------------------

_SHARD_MODULES = (
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec", "chunk"),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec", "enumerable"),
    ("torch.distributed._shard.sharding_spec.api", "ShardingSpec", "spec"),
    ("torch.distributed._shard.metadata", "ShardMetadata", "shard"),
    ("torch.distributed._shard.sharder", "Sharder", "sharder"),
    ("torch.distributed._shard.sharding_plan.api", "ShardingPlan", "plan"),
    ("torch.distributed.remote_device", "_remote_device", "device"),
)


def shard_kind(value: object) -> str | None:
    """Which of torch's sharding objects ``value`` is, or None.

    Asks only modules that are loaded already: nobody can hold an instance of a class that was never imported.
    """
    for module, name, kind in _SHARD_MODULES:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, name)):
            return kind
    return None


def build_torch_metadata(spec: Any, shape: Sequence[int]) -> Any:
    """What a spec of torch makes of a contiguous float tensor of ``shape``: an object with ``shards_metadata``."""
    import torch
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    return spec.build_metadata(torch.Size(shape), TensorProperties(dtype=torch.get_default_dtype()))


def torch_remote_device(text: str) -> Any:
    """Torch's remote device of ``text``."""
    from torch.distributed.remote_device import _remote_device

    return _remote_device(text)


def torch_shard_metadata(offsets: list[int], sizes: list[int], placement: Any) -> Any:
    """Torch's shard metadata."""
    from torch.distributed._shard.metadata import ShardMetadata

    return ShardMetadata(offsets, sizes, placement)


def torch_chunk_spec(dim: int, placements: list[Any]) -> Any:
    """Torch's chunk sharding spec."""
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return ChunkShardingSpec(dim, placements)


def torch_enumerable_spec(shards: list[Any]) -> Any:
    """Torch's enumerable sharding spec."""
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    return EnumerableShardingSpec(shards)
