"""An accelerate loop: the optimizer is prepared, wrapped and saved as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, WholeMatrices
from torch import nn


def before_ranks() -> None:
    """Import accelerate once, in the process that ranks are forked from: it takes seconds in each."""
    import accelerate

    assert accelerate.Accelerator


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


@pytest.mark.extra("accelerate")
@pytest.mark.filterwarnings("ignore")  # accelerate's own
@pytest.mark.ranks(2)
def test_prepared_with_ddp(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    numbers = {"RANK": ranks.rank, "LOCAL_RANK": ranks.rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(WholeMatrices(model.named_parameters(), _muon))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, total_iters=4))
    reference = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
    one = _muon(list(reference.values()))
    compared = updated = 0
    for step in range(10):
        with accelerator.accumulate(model):
            generator = torch.Generator().manual_seed(10 * step + ranks.rank)
            accelerator.backward(model(torch.randn(3, 6, generator=generator).double()).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for name, value in model.named_parameters():
                    reference[name].grad = value.grad.clone()
                one.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
                one.step()
                updated += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for name, value in model.named_parameters():
            assert torch.equal(value, reference[name]), (step, name)
            compared += value.numel()
    assert updated == 5 and compared == 10 * 80
    # accelerate saves the first rank's state alone: that is refused, not taken for all.
    saved = ranks.gather(optimizer.state_dict())[0]
    with pytest.raises(PlanError, match="missing-source"):
        optimizer.load_state_dict(saved)
