from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
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


@pytest.mark.ranks(2)
def test_delayed(ranks: Ranks) -> None:
    with ranks.delayed():
        t = torch.full((4,), float(ranks.rank), device=ranks.device)
        w = dist.all_reduce(t, async_op=True)
        assert t.isnan().all()
        w.wait()
        assert t.tolist() == [1.0] * 4
        y = fc.all_reduce(t, "sum", dist.group.WORLD)
        z = y + 1
        assert z.tolist() == [3.0] * 4
        m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        m(torch.ones(2, 4)).sum().backward()
        assert m.module.weight.grad.tolist() == [[2.0] * 4] * 4
        out = torch.empty(3 if ranks.rank else 5)
        inp = torch.arange(4.0)
        dist.all_to_all_single(out, inp, [1, 2] if ranks.rank else [3, 2], [3, 1] if ranks.rank == 0 else [2, 2])
        print(out)
