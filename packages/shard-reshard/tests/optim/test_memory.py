"""Memory of a step beside masters and state."""

from __future__ import annotations

import pytest
import torch
from peak_memory import peak_bytes
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch.distributed.tensor import Shard
from whole_models import mesh_of, of_mesh


@pytest.mark.ranks(2)
def test_a_step_needs_its_shards_and_four_buckets(ranks: Ranks) -> None:
    matrix, bucket, count = 128 * 512 * 4, 2 * 128 * 512 * 4, 16
    twin = of_mesh(mesh_of((2,)), [Shard(0)], {f"w{number}": (128, 512) for number in range(count)})
    optimizer = WholeMatrices(twin.named, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_bytes=bucket)
    one = torch.optim.SGD(list(twin.reference.values()), lr=0.1)
    for step in range(5):
        twin.backward(step)
        peak = peak_bytes(optimizer.step)
        one.step()
        assert twin.compared() > 0
        if step == 0:
            assert peak >= sum(optimizer.plan.owned_bytes) // 2  # masters come into being
            continue
        # New values are apart until every rank has all of its own; two exchanges are in flight, and their matrices.
        shards = count * matrix // 2
        assert shards <= peak <= shards + 4 * bucket, (peak, shards, bucket)
    assert len(optimizer.plan.chunks) == 4
