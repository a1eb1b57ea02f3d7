"""Steps of two threads: one after the other they are right, and at once both are refused, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn


def made() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def update(model: Any, optim: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optim.step()
    optim.zero_grad()


class Beside(threading.Thread):
    """Makes a call of a step while another one runs."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call, self.error = call, ""
        self.start()

    def run(self) -> None:
        entered.wait(60)
        try:
            self.call()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        left.set()


entered, left = threading.Event(), threading.Event()


def update_beside(model: Any, optim: Any, x: torch.Tensor) -> None:
    entered.set()
    left.wait(60)
    update(model, optim, x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_two_threads_run_no_steps_at_once(ranks: Ranks, door: Any, style: Any) -> None:
    """Their collectives mixed: ranks read each other's pickles of another step, or waited for the group's timeout."""
    mesh = ranks.mesh((2,), ("dp",))
    (model, optim), (other, other_optim), (plain, alone) = made(), made(), made()
    inner = door(update, mesh=mesh, style=style)
    step = dp.distribute(update_beside, mesh=mesh, style=style, check="never")  # a check would set events back
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = x[4 * ranks.rank : 4 * ranks.rank + 4]
    for _ in range(5):
        entered.clear()
        left.clear()
        beside = Beside(lambda: inner(other, other_optim, mine))
        with pytest.raises(dp.PlanError, match=r"ranks-diverge.*another thread runs a step while update is called"):
            step(model, optim, mine)
        beside.join()
        assert "another thread runs a step while update is called" in beside.error, beside.error
        update(plain, alone, x)  # the refusal of this call comes behind its update
    for _ in range(3):  # one at a time, in any thread
        inner(other, other_optim, mine)
        beside = Beside(lambda: step(model, optim, mine))
        beside.join()
        assert not beside.error
        update(plain, alone, x)
    step.release()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=0)
    inner.release()
