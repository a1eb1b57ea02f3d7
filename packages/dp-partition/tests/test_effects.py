"""What a step does in Python beside its tensors: a graph would do it once, so it is refused.

Before this was looked for, each of these steps trained, and wrongly: a random factor drawn once, a learning rate that a
scheduler inside the step no longer changed, a list that held one fake loss.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import dp_partition as dp
import pytest
import torch
from ranktest import Ranks
from torch import nn

Step = Callable[..., Any]
mse = nn.functional.mse_loss


def finish(loss: Any, optim: torch.optim.Optimizer) -> Any:
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def plain(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return finish(mse(model(x), y), optim)


def counting() -> Step:
    calls = 0

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return finish(mse(model(x), y) / calls, optim)

    return step


def alternating() -> Step:
    """The same operators with the same shapes, on other weights."""
    calls = 0

    def step(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return finish(mse(model[2 * (calls % 2)](x), y), optim)

    return step


def python_draw(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return finish(mse(model(x * random.random()), y), optim)


def own_draw() -> Step:
    own = random.Random(0)
    return lambda model, optim, x, y: finish(mse(model(x * own.random()), y), optim)


def numpy_draw(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    import numpy

    factor = float(numpy.random.beta(1.0, 1.0))  # noqa: NPY002 - what mixup is usually written with
    return finish(mse(model(x * factor), y), optim)


def constant_tensor() -> Step:
    factors = iter(range(1, 100))
    return lambda model, optim, x, y: finish(mse(model(x * torch.tensor(float(next(factors)))), y), optim)


def seeded(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return finish(mse(model(x + torch.randn_like(x)), y), optim)


def scheduled() -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optim, x, y)
        for group in optim.param_groups:
            group["lr"] = group["lr"] * 0.5
        return loss

    return step


def collecting() -> Step:
    history: list[Any] = []

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optim, x, y)
        history.append(loss.detach())
        return loss

    return step


def collecting_numbers() -> Step:
    history: list[float] = []

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optim, x, y)
        history.append(loss.item())
        return loss

    return step


def showing() -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optim, x, y)
        f"loss {loss.item()}"  # as a log line would; it would be written once
        return loss

    return step


def caching() -> Step:
    @lru_cache
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, size).tril()

    return lambda model, optim, x, y: finish(mse(model(mask(4) @ x), y), optim)


def returning_the_time() -> Step:
    ticks = iter(range(100))
    return lambda model, optim, x, y: {"loss": plain(model, optim, x, y), "tick": next(ticks)}


# what the step does -> how it is made, the problem's code, what else its message says
REFUSED: dict[str, tuple[Callable[[], Step], str, str]] = {
    "a counter in a closure": (counting, "python-state", ""),
    "weights that alternate": (alternating, "python-state", ""),
    "`random.random()`": (lambda: python_draw, "python-random", "Python"),
    "a `random.Random` of one's own": (own_draw, "python-state", ""),
    "`numpy.random`": (lambda: numpy_draw, "python-random", "NumPy"),
    "a tensor made of another number each time": (constant_tensor, "python-state", ""),
    "`torch.manual_seed`": (lambda: seeded, "python-random", "seed of torch"),
    "a learning rate changed inside": (scheduled, "hyperparameter-changed", r"param_groups\[0\]\['lr'\]"),
    "losses put into a list": (collecting, "value-kept", r"shape \(\)"),
    "`loss.item()` put into a list": (collecting_numbers, "value-kept", "a number"),
    "`loss.item()` shown": (showing, "value-kept", "a number"),
    "a tensor put into a cache": (caching, "value-kept", r"shape \(4, 4\)"),
    "a tick that is returned": (returning_the_time, "python-state", "tick|return"),
}


def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_leave_out_is_refused(name: str) -> None:
    make, code, words = REFUSED[name]
    model, optim = fresh()
    with pytest.raises(dp.PlanError) as error:
        dp.estimate(make(), model, optim, torch.ones(4, 4), torch.zeros(4, 4), world=2, style="fully_shard")
    assert {problem.code for problem in error.value.problems} == {code}
    assert re.search(words, str(error.value))


@pytest.mark.ranks(2)
def test_a_refusal_leaves_everything_as_it_was(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    model, optim = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    numbers = random.getstate(), torch.get_rng_state()
    for make in (counting, lambda: python_draw, lambda: seeded, scheduled, collecting):
        with pytest.raises(dp.PlanError):
            dp.compile(make(), mesh=mesh, style="fully_shard")(model, optim, x, y)
    assert all(map(torch.equal, before, model.parameters())) and len(before) == 4
    assert optim.param_groups[0]["lr"] == 0.1 and not optim.state
    assert random.getstate() == numbers[0] and torch.equal(torch.get_rng_state(), numbers[1])
    step = dp.compile(plain, mesh=mesh, style="fully_shard")
    losses = [float(step(model, optim, x, y)) for _ in range(5)]
    assert losses[-1] < losses[0] and step.num_traces == 1


@pytest.mark.ranks(2)
def test_the_same_by_arguments_and_results(ranks: Ranks) -> None:
    """What the errors advise: random factors in a tensor, schedulers between steps, losses returned."""
    mesh = ranks.mesh((2,), ("dp",))

    def mixed(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> Any:
        loss = finish(mse(model(x * factor), y), optim)
        return loss, loss.item()  # a number may be returned

    drawn = [torch.tensor(random.Random(step).random()) for step in range(5)]
    generator = torch.Generator().manual_seed(ranks.rank)
    batches = [(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(5)]
    results = []
    for wrapped in (False, True):
        model, optim = fresh()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        step: Any = dp.compile(mixed, mesh=mesh) if wrapped else mixed
        used: Any = model if wrapped else nn.parallel.DistributedDataParallel(model)
        losses = []
        for (x, y), factor in zip(batches, drawn, strict=True):
            loss, number = step(used, optim, x, y, factor)
            assert float(loss.detach()) == number
            losses.append(number)
            schedule.step()
        if wrapped:
            assert step.num_traces == 1
            step.release()
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0] and len(set(results[0][0])) == 5
    assert sum(map(torch.equal, results[0][1], results[1][1])) == 4
