"""Blocks of plain parameters: within one another, of steps that share, and what is left of them afterwards."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

SGD = partial(torch.optim.SGD, lr=0.1)


def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(x))


def started(ranks: Ranks) -> tuple[dp.CompiledStep, dp.CompiledStep, nn.Module, Any, torch.Tensor]:
    """A step, one that shares its parameters, both called; model, optimizer and batch."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim, x = SGD(model.parameters()), torch.ones(4, 8, device=ranks.device)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    step(model, optim, x)
    shares = dp.compile(evaluate, share=step)
    shares(model, x)
    return step, shares, model, optim, x


@pytest.mark.ranks(2)
def test_a_block_within_a_block(ranks: Ranks) -> None:
    """The inner one took the outer one's parameters away: what they held was lost, and the outer one failed."""
    step, shares, model, optim, x = started(ranks)
    for inner in (step, shares):
        with step.unsharded(), torch.no_grad():
            first = next(model.parameters())
            first.fill_(2.0)
            with inner.unsharded():
                assert next(model.parameters()) is first
                first.mul_(3.0)
            assert next(model.parameters()) is first
        placed = next(model.parameters())
        assert isinstance(placed, DTensor)
        assert placed.to_local().unique().tolist() == [6.0]
        with shares.unsharded(writeback=False), torch.no_grad():
            next(model.parameters()).zero_()
        assert placed.to_local().unique().tolist() == [6.0]
    step(model, optim, x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_what_a_block_has_written_stays_after_an_error(ranks: Ranks, door: Any) -> None:
    """As on one device: a caught error of an evaluation took them back without a word."""
    model = models.seeded(models.mlp)
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    step = door(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    for _ in range(3):
        step(model, optim, torch.ones(4, 8))
    with pytest.raises(KeyError), step.unsharded(), torch.no_grad():  # noqa: PT012 - the error of the block's last line
        for parameter in model.parameters():
            parameter.fill_(2.0)
        raise KeyError("in an evaluation")
    shards: list[Any] = list(model.parameters())
    assert len(shards) >= 4 and all(bool((shard.full_tensor() == 2.0).all()) for shard in shards)
    with pytest.raises(KeyError), step.unsharded(writeback=False), torch.no_grad():  # noqa: PT012 - as above
        next(model.parameters()).zero_()
        raise KeyError("in an evaluation")
    assert bool((shards[0].full_tensor() == 2.0).all())
    step(model, optim, torch.ones(4, 8))


@pytest.mark.ranks(2)
def test_what_is_called_within_a_block(ranks: Ranks) -> None:
    """`release` within a block left shards in the model that nothing could use; that of a step that shares did too."""
    step, shares, model, optim, x = started(ranks)
    with step.unsharded():
        for call in (partial(step, model, optim, x), partial(shares, model, x)):
            with pytest.raises(dp.PlanError, match=r"unsharded-now|model-changed"):
                call()
        with pytest.raises(dp.PlanError, match="unsharded-now"):
            step.release()
        assert type(next(model.parameters())) is nn.Parameter
    with pytest.raises(dp.PlanError, match=r"model-changed.*mean_step"):
        shares.release()
    step(model, optim, x)
    step.release()
    models.mean_step(model, optim, x)
    assert type(next(model.parameters())) is nn.Parameter


@pytest.mark.ranks(2)
def test_what_was_made_within_a_block(ranks: Ranks) -> None:
    """An optimizer from within the block trained parameters that were in no model any more."""
    step, _, model, optim, x = started(ranks)
    with step.unsharded():
        params, copied = list(model.parameters()), copy.deepcopy(model)
        other = SGD(params)
        models.mean_step(model, other, x)
        trained = [p.detach().clone() for p in params]
    for reads in (other.step, other.zero_grad, partial(nn.utils.clip_grad_norm_, params, 1.0)):
        with pytest.raises(dp.PlanError, match=r"parameter-replaced.*within unsharded\(\)"):
            reads()
    full = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors
    assert sum(map(torch.equal, full, trained)) == sum(map(torch.equal, params, trained)) == 4, "values are kept"
    assert [type(p) for p in copied.parameters()] == [nn.Parameter] * 4, "a copy is nobody's parameter"
    models.mean_step(copied, SGD(copied.parameters()), x)
    for _ in range(5):
        step(model, optim, x)


@pytest.mark.ranks(2)
def test_eager_use_of_a_placed_model_says_what_to_do(ranks: Ranks) -> None:
    step, _, model, _, x = started(ranks)
    with pytest.raises(RuntimeError, match="mixed torch") as caught:
        model(x)
    assert "with step.unsharded()" in "".join(caught.value.__notes__)
    with step.unsharded():
        plain = model(x)
    step.release()
    assert torch.equal(model(x), plain)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.LazyLinear])
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_a_model_without_values_is_refused_on_all_ranks(ranks: Ranks, door: Any, kind: Any) -> None:
    with torch.device("meta" if ranks.rank and kind is torch.nn.Linear else "cpu"):
        model = kind(4, 2) if kind is torch.nn.Linear else kind(2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = door(models.mean_step, mesh=ranks.mesh((2,), ("dp",)))
    with pytest.raises(dp.PlanError) as caught:
        step(model, optim, torch.rand(4, 4))
    assert {problem.code for problem in caught.value.problems} == {"no-data"}
