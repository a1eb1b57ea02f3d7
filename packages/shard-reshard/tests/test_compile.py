"""torch.compile: one graph, and no rank drops the collective."""

from __future__ import annotations

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Resharder, plan_reshard, reshard

SHAPE = (4, 6)
# torch's own compiler warns about its imports on some builds.
QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
@pytest.mark.ranks(2)
def test_a_rank_that_discards_the_result_still_takes_part(ranks: Ranks) -> None:
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))

    def function(local: torch.Tensor) -> torch.Tensor:
        moved = resharder(local * 2)
        return moved + 1 if ranks.rank else local.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    full = torch.arange(24.0).view(SHAPE)
    for step in range(3):
        with ranks.record() as log:
            found = compiled(full.chunk(2)[ranks.rank] + step)
        assert log.count("all_to_all") == 1
        if ranks.rank:
            assert torch.equal(found, 2 * (full + step).chunk(2, 1)[1] + 1)


@QUIET
@pytest.mark.ranks(2)
def test_gradients_and_the_one_shot_function(ranks: Ranks) -> None:
    full = torch.arange(24.0).view(SHAPE)

    def function(local: torch.Tensor) -> torch.Tensor:
        moved = reshard(local, "2: S(0)", "2: S(1)", shape=SHAPE)
        total: torch.Tensor = (moved * moved).sum()
        return total

    local = full.chunk(2)[ranks.rank].clone().requires_grad_()
    torch.autograd.backward(torch.compile(function, fullgraph=True, backend="aot_eager")(local))
    assert local.grad is not None
    assert torch.equal(local.grad, 2 * full.chunk(2)[ranks.rank])
