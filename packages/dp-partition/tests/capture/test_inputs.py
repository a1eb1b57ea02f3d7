"""Numbers of the call, of parameter groups and of optimizer state are inputs and outputs of the graph."""

from __future__ import annotations

import math
import warnings
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

CALLS = 10


class Counting(Optimizer):
    """Counts steps in its groups, and in the state of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["n"] = state.get("n", 0) + 1
                param.add_(param.grad, alpha=-group["lr"] / math.sqrt(state["n"]) / (1 + group["k"]))


def train(model: nn.Module, optim: Any, x: torch.Tensor, call: int, named: bool = True) -> Any:
    for group in optim.param_groups:
        group["lr"] = 0.1 * min(1, (call + 1) / 4) * 0.9**call
    loss = model(x).square().mean() * (2.0 if call % 2 else 1.0)
    optim.zero_grad()
    loss.backward()
    optim.step()
    return {"loss": loss, "twice": 2 * call} | ({"name": f"call {call}"} if named else {})


def unnamed(*args: Any) -> Any:
    return train(*args, named=False)  # type: ignore[misc]


def run(step: Any, model: nn.Module, optim: Any, xs: list[torch.Tensor]) -> list[Any]:
    results = [step(model, optim, x, call) for call, x in enumerate(xs)]
    return [{key: float(v.detach()) if key == "loss" else v for key, v in result.items()} for result in results]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_numbers_are_inputs_and_outputs(ranks: Ranks, style: Any) -> None:
    """Equal batches on all ranks, so one process is the reference."""
    xs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)).double() for n in range(CALLS)]
    for function in (train, unnamed):
        for make in (Counting, lambda p: torch.optim.AdamW(p, lr=0.1)):
            own, plain = models.seeded(models.mlp).double(), models.seeded(models.mlp).double()
            optims = make(own.parameters()), make(plain.parameters())
            step = dp.compile(function, mesh=ranks.mesh((2,), ("dp",)), style=style)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = run(step, own, optims[0], xs)
                want = run(function, plain, optims[1], xs)
            traces = step.num_traces
            step.release()
            assert [r.get("name") for r in got] == [r.get("name") for r in want]
            assert [r["twice"] for r in got] == [r["twice"] for r in want]
            assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in want], rel=1e-9)
            assert [g["lr"] for g in optims[0].param_groups] == [g["lr"] for g in optims[1].param_groups]
            counts = [[state.get("n") for state in optim.state.values()] for optim in optims]
            assert counts[0] == counts[1] and len(counts[0]) == 4
            for one, other in zip(own.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
            assert function is train or traces <= 7, "a text of the number takes a trace for each"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_scheduler_that_the_step_reads_or_steps_is_never_frozen(ranks: Ranks, style: Any) -> None:
    def reads(model: nn.Module, optim: Any, scheduler: LRScheduler, x: torch.Tensor) -> Any:
        return models.mean_step(model, optim, x), scheduler.get_last_lr()[0], scheduler.last_epoch

    def steps(model: nn.Module, optim: Any, scheduler: LRScheduler, x: torch.Tensor) -> Any:
        loss = models.mean_step(model, optim, x)
        scheduler.step()
        return loss, optim.param_groups[0]["lr"], scheduler.last_epoch

    mesh = ranks.mesh((2,), ("dp",))
    for function, door in ((reads, dp.compile), (reads, dp.distribute), (steps, dp.distribute)):
        for kind in (lambda o: StepLR(o, 2, 0.5), lambda o: ExponentialLR(o, 0.9)):
            rows = []
            for step in (door(function, mesh=mesh, style=style, check="never"), function):
                model = models.seeded(models.mlp)
                optim = torch.optim.SGD(model.parameters(), lr=0.1)
                scheduler = kind(optim)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for _ in range(5):
                        _, *numbers = step(model, optim, scheduler, torch.ones(2, 8))
                        scheduler.step()
                        rows.append(numbers)
            assert rows[:5] == rows[5:]
    model = models.seeded(models.mlp)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dp.PlanError, match=r"dp_partition.distribute"):
        dp.compile(steps, mesh=mesh, style=style)(model, optim, StepLR(optim, 2, 0.5), torch.ones(2, 8))
