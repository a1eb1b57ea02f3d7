"""Reshard after forward: the same numbers, parameters gathered twice, a lower peak."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.plan.placements import fake_mesh
from dp_verification import verify
from ranktest import Ranks
from torch import nn

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SMALL = 4 * 33 * 32 / (1 << 20)  # a bucket holds one layer


def deep(width: int = 32, layers: int = 6) -> nn.Sequential:
    """More bytes of parameters than of activations."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def rows() -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


def layer_bytes(plan: dp.PartitionPlan, names: set[str]) -> int:
    return sum(param.info.num_bytes for param in plan.params if param.info.name in names)


@pytest.mark.ranks(2)
def test_equal_bit_for_bit_with_a_second_gather(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    results: dict[Any, list[torch.Tensor]] = {}
    gathered: dict[Any, int] = {}
    for reshard in (False, True, [f"{i}.0.weight" for i in (0, 1, 2)]):
        model = models.seeded(deep).to(ranks.device)
        optim = ADAMW(model.parameters())
        settings: dict[str, Any] = {
            "style": "fully_shard", "bucket_mb": SMALL, "reshard_after_forward": reshard
        }  # fmt: skip
        step = dp.compile(models.mean_step, mesh=mesh, check="first", **settings)
        x = rows().to(ranks.device) + ranks.rank
        estimate = dp.estimate(models.mean_step, model, optim, x, world=2, rank=ranks.rank, **settings)
        losses = [step(model, optim, x) for _ in range(5)]
        with ranks.record() as log:
            losses.append(step(model, optim, x))
        assert tuple(m.kind for m in estimate.messages) == models.kinds_of(log)
        assert [m.sent_bytes for m in estimate.messages] == [sum(event.bytes_sent) for event in log.events]
        results[str(reshard)] = [*losses, *(p.to_local() for p in model.parameters())]  # type: ignore[attr-defined]
        gathered[str(reshard)] = log.bytes_sent("all_gather")
    assert len(results) == 3
    for name in results:
        pairs = list(zip(results["False"], results[name], strict=True))
        assert [torch.equal(a, b) for a, b in pairs] == [True] * (6 + 12)
    forward = layer_bytes(step.plan, {p.info.name for p in step.plan.params}) // 2
    # Backward needs no bias again, nor the first layer's weight, whose input wants no gradient.
    backward = layer_bytes(step.plan, {f"{i}.0.weight" for i in range(1, 6)}) // 2
    assert gathered.pop("False") == forward
    assert gathered.pop("True") == forward + backward
    assert list(gathered.values()) == [forward + layer_bytes(step.plan, {"1.0.weight", "2.0.weight"}) // 2]


def predicted(reshard: Any, **settings: Any) -> dp.Estimate:
    model = deep(layers=8)
    optim = ADAMW(model.parameters())
    settings = {"bucket_mb": SMALL, **settings}
    return dp.estimate(
        models.mean_step, model, optim, rows(), world=8, style="fully_shard", reshard_after_forward=reshard, **settings
    )


@pytest.mark.parametrize("semantics", ["local", "global"])
def test_the_peak_is_lower(semantics: str) -> None:
    peaks = {reshard: predicted(reshard, semantics=semantics).peak_bytes for reshard in (False, True)}
    total = sum(p.numel() * 4 for p in deep(layers=8).parameters())
    assert peaks[True] < peaks[False] - 0.25 * total, peaks


@pytest.mark.parametrize("semantics", ["local", "global"])
def test_every_node_is_verified(semantics: str) -> None:
    settings: dict[str, Any] = {"style": "fully_shard", "semantics": semantics, "reshard_after_forward": True}
    model = models.seeded(partial(models.GPT, tied=True))
    step = dp.compile(models.token_step, mesh=fake_mesh(1, 0, "cpu"), **settings)
    (batch,) = models.tokens(torch.Generator().manual_seed(0), rows=2)
    assert verify(step, model, ADAMW(model.parameters()), batch, world=(3,)).num_nodes > 120


class WritesItsCast(nn.Module):
    """Forward writes a cast of the weight in place: gathered and cast again, backward would not see that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            cut = self.second.weight.to(torch.float64)
            cut.clamp_(-0.05, 0.05)
        return torch.tanh(self.first(x)).double() @ (self.second.weight.double() * cut).T


@pytest.mark.ranks(2)
def test_a_cast_that_forward_writes_is_kept(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    results = []
    for reshard in (False, True):
        model = models.seeded(WritesItsCast).to(ranks.device)
        optim = ADAMW(model.parameters())
        step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard", reshard_after_forward=reshard)
        results.append([step(model, optim, torch.ones(3, 8, device=ranks.device)) for _ in range(5)])
        verify(step, model, optim, torch.ones(3, 8, device=ranks.device))
    assert [torch.equal(a, b) for a, b in zip(*results, strict=True)] == [True] * 5


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(dp.PlanError, match="reshard_after_forward"):
        predicted("often")
