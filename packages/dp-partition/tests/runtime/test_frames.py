"""Python frames of this package that one call enters, the first and a steady one."""

from __future__ import annotations

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.plan.plan import Style
from ranktest import Ranks, functions_entered


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_steady_call_enters_few_frames(ranks: Ranks, style: Style) -> None:
    """Four parameters under AdamW, whose group has ten entries: 178 frames before arguments were read once."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style=style, check="first")
    x = torch.ones(4, 8, device=ranks.device)
    for _ in range(4):
        step(model, optim, x)
    entered = functions_entered(dp, lambda: step(model, optim, x))
    assert entered.total() <= 74 and len(entered) <= 60, entered


@pytest.mark.ranks(2)
def test_the_first_call_enters_a_bounded_number_of_functions(ranks: Ranks) -> None:
    """The first call plans, traces, partitions, places and checks through few files."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    entered = functions_entered(dp, lambda: step(model, optim, torch.ones(4, 8, device=ranks.device)))
    files = {file for file, _ in entered}
    assert len(entered) <= 450 and len(files) <= 35, (len(entered), len(files), *sorted(files))
