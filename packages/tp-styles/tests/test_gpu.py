"""On a GPU: two tensor-parallel ranks train as one process does, and no later call waits for the device.

nox -s "tests(tp-styles)" -- -m gpu --ranks-device cuda
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from ranktest import Ranks
from torch import nn
from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

pytestmark = pytest.mark.gpu


@pytest.mark.ranks(1, 2)
def test_ranks_train_as_one_process(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(ranks.device, torch.float64)
    parallel = copy.deepcopy(model)
    apply_plan(parallel, ranks.mesh((ranks.world_size,), ("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
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
