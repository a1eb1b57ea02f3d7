"""Collectives of a step, as its estimate counts them."""

from __future__ import annotations

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks


@pytest.mark.ranks(2)
def test_a_step_explains_what_carries_a_parameter(ranks: Ranks) -> None:
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    with pytest.raises(dp.PlanError, match="not-sharded"):
        step.explain()
    step(model, optim, torch.ones(4, 8, device=ranks.device))
    text = step.explain("2.weight")
    assert "all_gather 0 of 3 in forward" in text
    assert "reduce_scatter 2 of 3 in backward" in text
    report = step.explain()
    assert "  2 all_gather send" in report and "1 reduce_scatter send" in report and "past its arguments" not in report
    local = next(node for node in step.graph.graph.nodes if node.name.startswith("param_0_weight"))
    assert tuple(local.meta["val"].shape) == (8, 8)
