"""A step over its life: other batches, evaluation, random numbers, a failure, its release."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)  # one node: traced in half the time


@pytest.mark.ranks(2)
def test_evaluation_shares_the_placed_parameters(ranks: Ranks) -> None:
    def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(model(x))

    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard")
    x = torch.ones(4, 8, device=ranks.device)
    evaluation = dp.compile(evaluate, share=step)
    with pytest.raises(dp.PlanError, match="not-sharded"):
        evaluation(model, x)
    for _ in range(3):
        step(model, optim, x)
        out = evaluation(model, x)
        with step.unsharded():
            assert torch.equal(out, model(x))
    assert (step.num_traces, evaluation.num_traces) == (1, 1)


def failing_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, i: torch.Tensor) -> Any:
    loss: Any = model(x)[i].square().mean()  # an index out of range fails at run time only
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


@pytest.mark.ranks(2)
def test_a_step_that_fails_leaves_everything_as_it_was(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(failing_step, mesh=mesh, style="replicate", check="first")
    x = torch.ones(4, 8, device=ranks.device) * (1 + ranks.rank)
    for _ in range(2):
        step(model, optim, x, torch.tensor([0, 1], device=ranks.device))
    before = [t.clone() for t in (*model.state_dict().values(), *(s for d in optim.state.values() for s in d.values()))]
    if ranks.device.type == "cpu":  # on a GPU an assertion in a kernel ends the process
        with pytest.raises(IndexError) as caught:
            step(model, optim, x, torch.tensor([0, 99]))
        notes = "".join(caught.value.__notes__)
        assert "call 3 of failing_step on rank" in notes and "as they were before the step" in notes
        assert "raised by node index (aten.index.Tensor)" in notes, notes
    after = [*model.state_dict().values(), *(s for d in optim.state.values() for s in d.values())]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 19


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_an_error_of_one_rank_in_a_checked_call_reaches_all(ranks: Ranks, door: Any) -> None:
    """Its peers would wait in a collective of the graph until the group's timeout."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = FUSED(model.parameters())
    step = door(failing_step, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    right, wrong = torch.tensor([0, 1]), torch.tensor([0, 99 if ranks.rank else 1])
    x = torch.ones(4, 8) * (1 + ranks.rank)
    step(model, optim, x, right)
    before = [t.detach().clone() for t in (*model.parameters(), *(s for d in optim.state.values() for s in d.values()))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((IndexError, dp.PlanError)) as caught:
            step(model, optim, x, wrong)
    assert isinstance(caught.value, IndexError) == (ranks.rank == 1)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "call 2" in text if door is dp.compile else "rank-failed" in text or ranks.rank, text
    after = [*model.parameters(), *(s for d in optim.state.values() for s in d.values())]
    if door is dp.compile:
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, optim, x, right)  # the next call works


@pytest.mark.ranks(2)
def test_other_batch_sizes_retrace_once(ranks: Ranks) -> None:
    """The original has no key on shapes: another batch size fails or computes nonsense."""
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard")
    for rows, traces in [(4, 1), (6, 2), (4, 2), (6, 2)]:
        step(model, optim, torch.ones(rows, 8, device=ranks.device))
        assert step.num_traces == traces


@pytest.mark.ranks(2)
def test_many_traces_warn_and_are_let_go(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_partition.runner.MOST_PROGRAMS", 3)
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), check="never")
    for rows in range(1, 9):
        step(model, optim, torch.ones(rows, 8, device=ranks.device))
    with models.warns_once(ranks, "mean_step was traced 9 times"):
        step(model, optim, torch.ones(9, 8, device=ranks.device))
    step(model, optim, torch.ones(9, 8, device=ranks.device))
    assert step.num_traces == 9 and sum(map(len, runner_of(step).traces.programs.values())) == 3


@pytest.mark.ranks(2)
def test_release_gives_plain_tensors_back(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard")
    x = torch.ones(4, 8, device=ranks.device)
    step(model, optim, x)
    with step.unsharded():
        inside = [p.detach().clone() for p in model.parameters()]
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        model(x)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    step.release()
    assert [torch.equal(a, b) for a, b in zip(inside, model.parameters(), strict=True)] == [True] * 4
    states = [s for state in optim.state.values() for s in state.values()]
    assert len(states) == 12
    assert not any(isinstance(s, DTensor) for s in states)
    models.mean_step(model, optim, x)  # eager goes on
    with pytest.raises(dp.PlanError, match="not-sharded"):
        _ = step.plan
