"""Lists of parameters and optimizers from before the first call.

A step that reaches the model's parameters past its arguments saw none of the gradients that the trace makes:
`clip_grad_norm_` of a list made before clipped nothing, silently, in every style.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn

Step = Callable[..., Any]


def trained(model: nn.Module, optim: Any, x: torch.Tensor, between: Callable[[], object] = lambda: None) -> Any:
    optim.zero_grad()
    loss: Any = model(x).square().mean()
    loss.backward()
    between()
    optim.step()
    return loss


def clips(params: list[nn.Parameter], own: Any) -> Step:
    return lambda m, o, x: trained(m, o, x, lambda: nn.utils.clip_grad_norm_(params, 0.01))


def scales(params: list[nn.Parameter], own: Any) -> Step:
    return lambda m, o, x: trained(m, o, x, lambda: [p.grad.mul_(2) for p in params if p.grad is not None])


def regularises(params: list[nn.Parameter], own: Any) -> Step:
    return lambda m, o, x: trained(m, o, x, lambda: params[0].square().sum())


def averages(live: list[nn.Parameter], own: Any) -> Step:
    mean = [p.detach().clone() for p in live]
    return lambda m, o, x: trained(m, o, x, lambda: [a.lerp_(p.detach(), 0.5) for a, p in zip(mean, live, strict=True)])


def steps_another(params: list[nn.Parameter], own: Any) -> Step:
    return lambda m, o, x: trained(m, o, x, own.step)


@pytest.mark.parametrize("make", [clips, scales, regularises, averages, steps_another])
def test_parameters_that_a_step_reaches_past_its_arguments(make: Any) -> None:
    model = models.mlp()
    params = list(model.parameters())
    optim, own = (torch.optim.SGD(params, lr=0.1) for _ in range(2))
    with pytest.raises(dp.PlanError) as caught:
        dp.estimate(make(params, own), model, optim, torch.ones(2, 8), world=2, style="zero2")
    (problem,) = caught.value.problems
    assert problem.code == "parameter-in-closure"
    assert problem.name == "0.weight" or "test_fakes.py" in str(problem.found), "the parameter, or the line"
    assert {type(p) for p in params} == {nn.Parameter}
    assert all(p.grad is None for p in params)


@pytest.mark.ranks(2)
def test_what_was_made_before_the_first_call(ranks: Ranks) -> None:
    for style in ("replicate", "fully_shard"):
        model = models.mlp().to(ranks.device)
        params = list(model.parameters())
        values = [p.detach().clone() for p in params]
        optim, other = (torch.optim.SGD(params, lr=0.1) for _ in range(2))
        step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style=style)
        x = torch.ones(2, 8, device=ranks.device)
        for _ in range(5):
            step(model, optim, x)
        for reads in (other.step, other.zero_grad, partial(nn.utils.clip_grad_norm_, params, 1.0)):
            with pytest.raises(dp.PlanError, match="parameter-replaced"):
                reads()
        assert sum(map(torch.equal, params, values)) == 4, "values can be read"
        assert copy.deepcopy(params[0]).grad is None, "a copy is nobody's parameter"
        placed = torch.optim.SGD(model.parameters(), lr=0.1)
        step.release()
        with pytest.raises(dp.PlanError, match="parameter-replaced"):
            placed.step()
        before = [p.detach().clone() for p in model.parameters()]
        models.mean_step(model, optim, x)  # the step's own optimizer has gone along
        assert sum(map(torch.equal, before, model.parameters())) == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["fully_shard", "zero2"])
def test_averages_of_weights_in_a_closure_are_full_on_every_rank(ranks: Ranks, style: Any) -> None:
    """Written from shards, a rank's own rows alone would be new."""
    x = torch.ones(4, 8, device=ranks.device)
    results = []
    for wrapped in (False, True):
        model = models.seeded(models.mlp).to(ranks.device)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        means = [p.detach().clone() for p in model.parameters()]

        def step(model: Any, optim: Any, x: torch.Tensor, means: Any = means) -> Any:
            loss = models.mean_step(model, optim, x)
            with torch.no_grad():
                for mean, param in zip(means, model.parameters(), strict=True):
                    mean.sub_(0.1 * (mean - param))
            return loss

        used = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style=style) if wrapped else step
        for _ in range(4):
            used(model, optim, x)
        results.append(means)
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want)
