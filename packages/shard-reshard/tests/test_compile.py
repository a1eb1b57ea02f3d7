"""torch.compile: one graph, and no rank drops the collective."""

from __future__ import annotations

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Resharder, plan_reshard, reshard

SHAPE = (4, 6)


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about its imports on some builds
@pytest.mark.ranks(2)
def test_one_graph_that_no_rank_drops(ranks: Ranks) -> None:
    # One test for all, because every rank needs seconds to import the compiler.
    full = torch.arange(24.0).view(SHAPE)
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))

    def discarding(local: torch.Tensor) -> torch.Tensor:
        moved = resharder(local * 2)
        return moved + 1 if ranks.rank else local.sum()

    compiled = torch.compile(discarding, fullgraph=True, backend="aot_eager")
    for step in range(3):
        with ranks.record() as log:
            found = compiled(full.chunk(2)[ranks.rank] + step)
        assert log.count("all_to_all") == 1  # also on rank 0, which does not look at the result
        if ranks.rank:
            assert torch.equal(found, 2 * (full + step).chunk(2, 1)[1] + 1)

    def squares(local: torch.Tensor) -> torch.Tensor:
        moved = reshard(local, "2: S(0)", "2: S(1)", shape=SHAPE)
        total: torch.Tensor = (moved * moved).sum()
        return total

    local = full.chunk(2)[ranks.rank].clone().requires_grad_()
    torch.autograd.backward(torch.compile(squares, fullgraph=True, backend="aot_eager")(local))
    assert local.grad is not None
    assert torch.equal(local.grad, 2 * full.chunk(2)[ranks.rank])
