"""torch's ShardedTensor: any spec to any spec, the given one untouched."""

from __future__ import annotations

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, reshard_sharded_tensor
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata, to_torch


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.ranks(4)
def test_any_spec_to_any_spec(ranks: Ranks) -> None:
    from torch.distributed._shard import sharded_tensor

    def chunks(dim: int, order: list[int]) -> ChunkShardingSpec:
        return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order])

    grid = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [3, 7], "rank:2/cpu"),
            ShardMetadata([3, 0], [6, 2], "rank:0/cpu"),
            ShardMetadata([3, 2], [6, 5], "rank:2/cpu"),
        ]
    )
    full = torch.arange(63.0).view(9, 7)
    st = sharded_tensor.empty(to_torch(chunks(0, [1, 2, 3, 0])), 9, 7)
    for shard in st.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(full[offsets[0] : offsets[0] + sizes[0]])
    compared = 0
    for spec in (chunks(1, [0, 1, 2, 3]), grid, to_torch(chunks(-1, [3, 1])), chunks(0, [1, 2, 3, 0])):
        before = [shard.tensor.clone() for shard in st.local_shards()]
        with ranks.delayed():
            moved = reshard_sharded_tensor(st, spec)
        assert all(torch.equal(a, shard.tensor) for a, shard in zip(before, st.local_shards(), strict=True))
        assert moved.size() == torch.Size([9, 7])
        for shard in moved.local_shards():
            box = tuple(
                slice(o, o + s) for o, s in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            )
            assert torch.equal(shard.tensor, full[box])
            compared += shard.tensor.numel()
        st = moved
    assert sum(ranks.gather(compared)) == 4 * 63
    with pytest.raises(PlanError, match="wrong-type"):
        reshard_sharded_tensor(full, grid)
