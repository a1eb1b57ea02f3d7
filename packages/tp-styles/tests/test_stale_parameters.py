"""Whole parameters once their parts stand in the module: let go, and an error for whoever still trains them.

torch's `parallelize_module` leaves an optimizer that was made before with parameters that never get a gradient again:
it trains nothing that was sharded, and says nothing.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn

PLAN = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
OPTIMIZERS: list[Any] = [
    partial(torch.optim.SGD, lr=0.1, foreach=False),
    partial(torch.optim.AdamW, foreach=True),
    partial(torch.optim.AdamW, fused=True),
    torch.optim.Adagrad,
]


def told(call: Any) -> str:
    with pytest.raises(tp.PlanError, match="parameter-replaced") as caught:
        call()
    return caught.value.problems[0].name


@pytest.mark.ranks(2)
def test_an_optimizer_made_before_is_told(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    for make in OPTIMIZERS:
        model: Any = models.seeded(models.MLP)
        x = torch.randn(4, model.up.in_features)
        values = [p.detach().clone() for p in model.parameters()]
        params = list(model.parameters())
        before = make(params)
        handle = tp.apply_plan(model, mesh, PLAN)
        model(x).square().sum().backward()
        assert told(before.step) == told(before.zero_grad) == "up.weight"
        assert told(partial(nn.utils.clip_grad_norm_, params, 1.0)) == "up.weight"
        assert [torch.equal(p, v) for p, v in zip(params, values, strict=True)] == [True] * 4, "values can be read"
        assert copy.deepcopy(params[0]).grad is None, "a copy is nobody's parameter"
        after = make(model.parameters())
        after.step()
        handle.undo()
        model(x).square().sum().backward()
        assert told(after.step) == "up.weight"  # the parts that it trains are nobody's any more
        assert sum(not torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True)) == 4
        make(model.parameters()).step()


@pytest.mark.ranks(2)
def test_another_module_that_is_not_part_of_the_plan_holds_the_weight(ranks: Ranks) -> None:
    """Sharding one of two modules that share a weight parts them: the other would train a weight of its own."""
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = nn.ModuleDict({"inner": models.seeded(models.MLP), "head": nn.Linear(8, 12)})
    model["head"].weight = model["inner"].up.weight
    tp.apply_plan(model["inner"], mesh, PLAN)
    assert told(torch.optim.SGD(model.parameters(), lr=0.1).step) == "up.weight"
    with pytest.raises(tp.PlanError, match="tied-weights"):
        tp.apply_plan(model["head"], mesh, tp.ColwiseParallel())


@pytest.mark.ranks(2)
def test_a_kept_handle_keeps_no_whole_weight(ranks: Ranks) -> None:
    model: Any = models.seeded(models.MLP)
    refs = [weakref.ref(p) for p in model.parameters()]
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PLAN)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    del model.down.bias  # what the user took away stays away, and stops nobody
    assert sorted(name for name, _ in handle.undo().named_parameters()) == ["down.weight", "up.bias", "up.weight"]
