"""Loss scaling: ranks that hold different shards skip a step together."""

from __future__ import annotations

import math
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from tp_ddp_bridge import GradScaler, Problem, wrap_ddp
from tp_ddp_bridge import PlanError as OurError


def scaled_step(model: Any, optimizer: torch.optim.Optimizer, scaler: Any, x: Any, y: Any, poison: str = "") -> None:
    """One step; ``poison`` names a parameter that gets an infinite gradient on this rank."""
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    if poison:
        dict(model.named_parameters())[poison].grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.ranks(4)
def test_ranks_skip_a_step_together(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    index, second = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank() == 1
    task = models.vectors()
    for fused in (False, True):  # a fused optimizer asks the scaler another way
        reference = models.seeded(models.MLP)
        models.train(reference, torch.optim.SGD(reference.parameters(), 0.1), task)
        ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, fused=fused)
        scaler = GradScaler("cpu", init_scale=2.0**8)
        for step in range(5):  # scaling by a power of two and back is exact
            scaled_step(ddp, optimizer, scaler, *task.part(step, index, 2))
        models.assert_same_state(ddp.module.state_dict(), reference.state_dict(), count=6, atol=5e-7)
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        x, y = task.part(0, index, 2)
        scaled_step(ddp, optimizer, scaler, x, y, poison="module.up.weight" if second else "")
        assert sum(map(torch.equal, before, ddp.parameters())) == 6
        assert scaler.get_scale() == 2.0**7
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(nn.functional.mse_loss(ddp(x), y)))
        with ranks.record() as log:
            scaler.step(optimizer)
        assert log.ops == ("all_reduce",) and log.bytes_sent() == 4
        scaler.update()
        assert sum(map(torch.equal, before, ddp.parameters())) == 0

    # Of torch's scaler one rank would skip the step, the other go on.
    torch_scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    with pytest.raises(OurError, match=r"local-shard-as-full.*tp_ddp_bridge.GradScaler"):
        scaled_step(ddp, optimizer, torch_scaler, x, y, poison="module.up.weight" if second else "")
    assert all(map(torch.equal, before, ddp.parameters()))


@pytest.mark.ranks(2)
def test_nothing_is_sent_where_nothing_is_sharded(ranks: Ranks) -> None:
    model = models.seeded(models.MLP)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ranks.record(allow_empty=True) as log:
        for enabled in (True, False):
            scaler = GradScaler("cpu", enabled=enabled)
            x, y = models.vectors().part(0, 0, 1)
            scaled_step(model, optimizer, scaler, x, y)
    assert not log.events


def test_an_error_of_another_package_is_raised_as_ours() -> None:
    class PlanError(ValueError):
        _is_plan_error = True

        def __init__(self) -> None:
            self.problems, self.summary = (Problem("parameter-replaced", "weight"),), ""

    class Marked(nn.Parameter):
        @property
        def grad(self) -> Any:  # type: ignore[override]  # a property in place of the slot
            raise PlanError

    optimizer = torch.optim.SGD([Marked(torch.ones(2))], 0.1)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(OurError, match="parameter-replaced"):
        scaler.unscale_(optimizer)
