"""On a GPU: `wrap_ddp` around tp-styles' layers trains as one process does, and no later call waits for the device.

`nox -s integration_gpu` runs it under NCCL, `pytest --ranks-device cuda -m gpu` without torchrun.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from ranktest import Ranks
from torch import nn
from tp_ddp_bridge import wrap_ddp
from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan


@pytest.mark.gpu
@pytest.mark.ranks(1, 2)
def test_wrapped_ranks_train_as_one_process(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(ranks.device, torch.float64)
    mesh, sharded = ranks.mesh((1, ranks.world_size), ("dp", "tp")), copy.deepcopy(model)
    apply_plan(sharded, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallel = wrap_ddp(sharded, mesh=mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=True) for each in (model, parallel)]
    for call in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(call), dtype=torch.float64).to(ranks.device)
        losses = []
        for each, optimizer in zip((model, parallel), optimizers, strict=True):
            with ranks.no_host_waits() if call >= 3 else nullcontext():
                loss = each(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        assert torch.allclose(losses[1], losses[0], rtol=1e-9), call
