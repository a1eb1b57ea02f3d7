"""DDP over tensor parallelism trains as one process does: 2 x 2 ranks, 5 steps."""

from __future__ import annotations

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import check_optimizer, wrap_ddp


@pytest.mark.ranks(4)
def test_mlp_with_sgd(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    reference = models.seeded(models.MLP)
    task = models.vectors()
    models.train(reference, torch.optim.SGD(reference.parameters(), 0.1), task)

    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    ddp = wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    assert check_optimizer(ddp, optimizer) == 6
    models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
    state = model.state_dict()
    assert sum(isinstance(value, DTensor) for value in state.values()) == 4
    models.assert_same_state(state, reference.state_dict(), count=6, atol=5e-7)


@pytest.mark.ranks(4)
def test_transformer_with_adam_built_before(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    reference = models.seeded(models.GPT)
    task = models.tokens()
    models.train(reference, torch.optim.Adam(reference.parameters(), 1e-3), task)

    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    ddp = wrap_ddp(model, mesh=mesh, optimizers=[optimizer])
    models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
    models.assert_same_state(model.state_dict(), reference.state_dict(), count=len(reference.state_dict()), atol=5e-6)
