"""Steps of three families are measured beside shard-spec's predictions; `nox -s measured` does so for all 21."""

from __future__ import annotations

from typing import Any

import dp_partition as dp
import pytest
import torch
from measured_steps import PEAK_BOUND, collectives_error, is_exact, peak_error, step_of
from ranktest import Ranks
from shard_spec import ShardingPlan
from small_models import SmallGPT, train_step

CASES = [("llama", "FSDP2", True), ("gpt2", "FSDP2", False), ("mixtral", "tp-styles", False)]


@pytest.mark.filterwarnings("ignore")  # transformers and torch warn of their own use
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("family", "way", "checkpointing"), CASES)
def test_a_step_costs_what_shard_spec_counts(ranks: Ranks, family: str, way: str, checkpointing: bool) -> None:
    step: dict[str, Any] = step_of(ranks, family, f"{way}, 2 ranks", torch.float32, checkpointing)
    assert is_exact(step), step
    assert abs(peak_error(step)) <= PEAK_BOUND, step
    assert step["measured"]["collectives"], "nothing was recorded"
    assert collectives_error(step) == 0, step


def test_dp_partition_estimates_the_peak_of_the_same_step() -> None:
    """Both put the peak at the loss, where the step has set the gradients of the last one to None."""
    with torch.device("meta"):
        model = SmallGPT(vocab=512, dim=64, layers=4)
        ids = torch.zeros(8, 128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    step = dp.estimate(train_step, model, optimizer, (ids, ids), world=4, style="replicate", semantics="local")
    memory = ShardingPlan({}, mesh={"dp": 4}).memory(model, {"ids": ids, "targets": ids}, optimizer="adamw")
    assert memory.moment == "loss"
    assert memory.on(0)["gradients to come"] == -memory.on(0)["gradients"] < 0
    assert memory.max_bytes == pytest.approx(step.peak_bytes - step.held.batch_bytes, rel=PEAK_BOUND)
