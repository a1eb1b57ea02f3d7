from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranktest import Ranks


@pytest.mark.ranks(2)
def test_all_reduce_is_recorded(ranks: Ranks) -> None:
    with ranks.record() as log:
        t = torch.full((4,), float(ranks.rank), device=ranks.device)
        dist.all_reduce(t)
    assert t.tolist() == [1.0] * 4
    assert log.ops == ("all_reduce",)
    assert log.bytes_sent() == 16


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("x", [1, 2])
def test_gather(ranks: Ranks, x: int, tmp_path) -> None:
    assert ranks.gather(ranks.rank) == list(range(ranks.world_size))
    ranks.mesh((2, ranks.world_size // 2), ("a", "b"))
