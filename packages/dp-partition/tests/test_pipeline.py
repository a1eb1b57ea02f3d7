"""Steps off the beaten track: right in every style or refused by name. All steps in all styles: ALL_STYLES=1."""

from __future__ import annotations

import os

import dp_models as models
import dp_partition as dp
import dp_plain_step
import dp_step_table
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_step_table import ALSO_REFUSED, STEP_ROWS
from ranktest import Ranks
from torch import nn

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")


def chosen(style: str) -> list[str]:
    """Each step in one style, in turn; what depends on where parameters lie, or with ALL_STYLES set each, in all."""
    names = list(STEP_ROWS)
    if os.environ.get("ALL_STYLES"):
        return names
    turn = STYLES.index(style)
    return [n for index, n in enumerate(names) if index % len(STYLES) == turn or STEP_ROWS[n].every]


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("style", STYLES)
def test_right_or_refused(ranks: Ranks, style: str) -> None:
    results = {}
    for name in chosen(style):
        with models.case(name):
            results[name] = dp_step_table.run_row(ranks, STEP_ROWS[name], style)
    for name, result in results.items():
        code = STEP_ROWS[name].refused or ALSO_REFUSED.get((name, style))
        if code:
            assert result == f"refused: {code}", name
        else:
            assert not result.startswith("refused"), (name, result)
    assert len(results) >= 9


class Warm(nn.Module):
    """Has a plain number that the user changes between calls, and a cache that forward fills in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = nn.Linear(8, 8), 1.0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) / self.temperature
        self.last = out
        return out


@pytest.mark.ranks(2)
def test_a_number_in_an_attribute_is_part_of_the_trace(ranks: Ranks) -> None:
    """The original keeps the number of its only trace. What forward leaves in an attribute is the call's own tensor."""
    torch.manual_seed(0)
    model = Warm().to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    step = dp.compile(dp_plain_step.plain, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x, y = torch.ones(4, 8, device=ranks.device), torch.zeros(4, 8, device=ranks.device)
    losses, left = [], []
    for temperature, traces in [(1.0, 1), (2.0, 2), (1.0, 2)]:
        model.temperature = temperature
        losses.append(step(model, optim, x, y).item())
        assert step.num_traces == traces
        assert type(model.last) is torch.Tensor, "a trace leaves nothing of its own behind"
        left.append(model.last)
    assert losses[0] == losses[2] == pytest.approx(4 * losses[1], rel=1e-6)
    assert torch.equal(left[0], left[2]) and torch.equal(left[0], 2 * left[1]) and left[0].any()


@pytest.mark.ranks(2)
def test_a_model_that_is_distributed_already_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = dp_plain_step.mlp().to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 8, device=ranks.device)
    dp.compile(dp_plain_step.plain, mesh=mesh, style="fully_shard")(model, optim, x, x)
    with pytest.raises(dp.PlanError, match="already-applied") as caught:
        dp.compile(dp_plain_step.plain, mesh=mesh)(model, optim, x, x)
    assert len(caught.value.problems) == 4
    wrapped = nn.parallel.DistributedDataParallel(dp_plain_step.mlp().to(ranks.device))
    with pytest.raises(dp.PlanError, match="already-applied"):
        dp.compile(dp_plain_step.plain, mesh=mesh)(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), x, x)
