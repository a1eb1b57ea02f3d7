"""Steps that do something in Python beside their tensors: a graph would do it once, so it is refused.

Before this was looked for, each of these steps trained, and wrongly: a random factor drawn once, a learning rate that a
scheduler inside the step no longer changed, a list that held one fake loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
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
    calls = bytearray(1)  # of a kind that nothing follows but a copy

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        calls[0] += 1
        return finish(mse(model(x * torch.tensor(float(calls[0]))), y), optim)

    return step


def seeded(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return finish(mse(model(x + torch.randn_like(x)), y), optim)


def scheduled() -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optim, x, y)
        for group in optim.param_groups:
            group["lr"] = 0.05
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
    "`random.random()`": (lambda: python_draw, "random-replay", "Python"),
    "a `random.Random` of one's own": (own_draw, "python-state", ""),
    "`numpy.random`": (lambda: numpy_draw, "random-replay", "NumPy"),
    "a tensor made of another number each time": (constant_tensor, "python-state", ""),
    "`torch.manual_seed`": (lambda: seeded, "random-replay", "seed of torch"),
    "a learning rate set to a constant inside": (scheduled, "hyperparameter-changed", r"param_groups\[0\]\['lr'\]"),
    "losses put into a list": (collecting, "python-state", ""),
    "`loss.item()` put into a list": (collecting_numbers, "value-kept", "a number"),
    "`loss.item()` shown": (showing, "value-kept", "a number"),
    "a tick that is returned": (returning_the_time, "unsupported-argument", "range_iterator"),
}
