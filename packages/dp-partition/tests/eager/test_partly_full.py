"""A parameter that FSDP2 cannot hold stays full by itself: the others are in shards, and values equal one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

CALLS = 6


class Scaled(nn.Module):
    """A learned temperature without a dimension, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scale.exp() * self.left(x) * self.right(x)
        return torch.as_tensor(scores.square().mean())


class Experts(nn.Module):
    """Each row goes to one of four experts. An expert without rows on a rank does not run there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] * 3).long().abs() % 4
        hidden = torch.tanh(self.inner(x))
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        return torch.as_tensor(self.outer(out).square().mean())


def clipped(model: nn.Module, optim: Any, x: torch.Tensor, foreach: bool | None) -> Any:
    loss: Any = model(x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
    optim.step()
    optim.zero_grad()
    return loss, norm


def trained(make: Callable[[], nn.Module], optimizer: Any, foreach: bool | None, door: Any, rank: int | None) -> Any:
    """Train on both ranks' rows, or on one rank's; return the step, the model and all norms."""
    torch.manual_seed(0)
    model = make().double()
    optim, norms = optimizer(model.parameters()), []
    step = door(clipped)
    for call in range(CALLS):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
        rows = x if rank is None else x[4 * rank :][:4]
        norms.append(float(step(model, optim, rows, foreach)[1]))
    return step, model, norms


OPTIMIZERS = {
    "loop": lambda params: torch.optim.AdamW(params, lr=0.02),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1, foreach=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("make", "full"), [(Scaled, {"scale"}), (Experts, {"experts"})])
def test_what_stays_full_leaves_the_rest_in_shards(ranks: Ranks, make: Any, full: set[str]) -> None:
    warnings.simplefilter("ignore")
    mesh, compared = ranks.mesh((2,), ("dp",)), 0
    for name, optimizer in OPTIMIZERS.items():
        foreach = None if name == "loop" else True
        _, alone, want = trained(make, optimizer, foreach, lambda step: step, None)
        door = lambda step: dp.distribute(step, mesh=mesh)  # noqa: E731
        step, model, norms = trained(make, optimizer, foreach, door, ranks.rank)
        left = {key for key, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert {key.partition(".")[0] for key in left} == full, name
        size = sum(p.nbytes for key, p in model.named_parameters() if key in left)
        assert f"full on every rank: {len(left)} parameters, {size:,} bytes" in step.explain()
        assert norms == pytest.approx(want, rel=1e-10)
        step.release()
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=name)
            compared += got.numel()
    assert compared == len(OPTIMIZERS) * sum(p.numel() for p in make().parameters())


@pytest.mark.ranks(2)
def test_a_weight_and_its_average_stay_of_one_kind(ranks: Ranks) -> None:
    """The average is combined with a plain tensor, so it stays full, and so does the weight that it averages."""
    torch.manual_seed(0)
    model, noise = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.ones(8, 8)
    average = [p.detach().clone() for p in model.parameters()]

    def step(model: Any, optim: Any, x: torch.Tensor) -> None:
        F.mse_loss(model(x), torch.ones(4, 3)).backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            average[0].lerp_(model[0].weight, 0.1).add_(noise, alpha=0.01)

    called = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALLS):
            called(model, optim, torch.ones(4, 8))
    assert [isinstance(p, DTensor) for p in model.parameters()] == [False, True, True, True]
    assert "0.weight: is combined with a plain tensor (lerp_)" in called.explain()
