"""An optimizer that was made before the module was sharded: told at its first step, and right again after `undo`.

The origin's `shard_module` leaves it with parameters that never get a gradient again, and nothing says so.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_spec import PlanError, shard_module
from shard_spec.sharding_plan import ShardingPlan
from torch import nn

OPTIMIZERS: list[Any] = [
    partial(torch.optim.SGD, lr=0.1, foreach=False),
    partial(torch.optim.AdamW, foreach=True),
    partial(torch.optim.AdamW, fused=True),
]
RULES = {"0.weight": "tp:S(0)", "0.bias": "tp:S(0)", "2.weight": "tp:S(1)"}


def told(call: Any) -> str:
    with pytest.raises(PlanError, match="parameter-replaced") as caught:
        call()
    return caught.value.problems[0].name


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.ranks(2)
def test_an_optimizer_made_before(ranks: Ranks) -> None:
    x = torch.randn(3, 6)
    for make in OPTIMIZERS:
        model, alone = network(), network()
        parameters = list(model.parameters())
        first, theirs = make(parameters), make(alone.parameters())
        handle = shard_module(model, ShardingPlan(RULES, mesh={"tp": 2}))
        model(x).square().sum().backward()
        assert told(first.step) == told(first.zero_grad) == "0.weight"
        assert [torch.equal(p, q) for p, q in zip(parameters, alone.parameters(), strict=True)] == [True] * 4
        assert copy.deepcopy(parameters[0]).grad is None, "a copy is nobody's parameter"
        second = make(model.parameters())
        handle.undo()
        assert told(second.step) == "0.weight"
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
        for _ in range(5):  # the first optimizer's parameters are the module's again
            for one, optimizer in ((model, first), (alone, theirs)):
                optimizer.zero_grad()
                one(x).square().sum().backward()
                optimizer.step()
        assert [torch.equal(p, q) for p, q in zip(parameters, alone.parameters(), strict=True)] == [True] * 4
        assert {type(p) for p in parameters} == {nn.Parameter}


@pytest.mark.ranks(2)
def test_after_apply(ranks: Ranks) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ShardingPlan(RULES, mesh={"tp": 2}).apply(model, ranks.mesh((2,), ("tp",)))
    assert told(optimizer.step) == "0.weight"
    handle.undo()
    optimizer.step()
