"""Checkpoints: DTensors through torch.distributed.checkpoint, saved on four ranks, loaded on two in another style."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optim)
    return {"model": weights, "optim": states}


def train(step: Any, model: nn.Module, optim: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [step(model, optim, batch).detach() for batch in batches]


@pytest.mark.ranks(4)
def test_saved_by_four_shards_and_loaded_by_two_replicas(ranks: Ranks, tmp_path: Path) -> None:
    """Seven rows over four ranks are uneven, three leave a rank empty; the pairs load before and after a first call."""
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 8, generator=generator, dtype=torch.float64).to(ranks.device) for _ in range(9)]

    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double().to(ranks.device)
        return model, ADAMW(model.parameters())

    torch.manual_seed(0)
    alone = make()
    model, optim = make()
    model.load_state_dict(alone[0].state_dict())
    expected = train(models.mean_step, *alone, batches)

    step = dp.compile(models.mean_step, mesh=ranks.mesh((4,), ("dp",)), style="fully_shard")
    train(step, model, optim, [batch.chunk(4)[ranks.rank] for batch in batches[:3]])
    saved = state_of(model, optim)
    shards = [t for t in saved["optim"]["state"]["2.weight"].values() if isinstance(t, DTensor)]
    assert len(shards) == 2
    assert [tuple(t.to_local().shape) for t in shards] == [(int(ranks.rank < 3), 7)] * 2
    save(saved, checkpoint_id=tmp_path / "checkpoint")

    pair = ranks.mesh((2, 2), ("pair", "dp"))["dp"]
    group, row = pair.get_group(), ranks.rank % 2
    other, theirs = make()
    pair_step = dp.compile(models.mean_step, mesh=pair, style="replicate")
    if ranks.rank >= 2:  # this pair loads into what is placed already
        train(pair_step, other, theirs, [batches[0].chunk(2)[row]])
    loaded = state_of(other, theirs)
    load(loaded, checkpoint_id=tmp_path / "checkpoint", process_group=group)
    set_state_dict(other, theirs, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    losses = train(pair_step, other, theirs, [batch.chunk(2)[row] for batch in batches[3:6]])
    assert pair_step.num_traces == 1
    means = torch.stack([torch.stack(ranks.gather(loss.cpu())).reshape(2, 2).mean(1) for loss in losses])
    torch.testing.assert_close(means, torch.stack(expected[3:6]).cpu()[:, None].expand(3, 2), rtol=1e-12, atol=0)

    # Plain again: the eager optimizer goes on where the ranks were.
    pair_step.release()
    assert not any(isinstance(p, DTensor) for p in other.parameters())
    counters = {int(state["step"]) for state in theirs.state.values()}
    assert counters == {6}
    losses = train(models.mean_step, other, theirs, batches[6:])
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected[6:]), rtol=1e-12, atol=0)
