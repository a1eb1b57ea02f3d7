"""`style="hybrid"`: shards over one axis of a mesh, replicas over the other, as FSDP2 on a mesh of two axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Scaled(nn.Module):
    """A scalar parameter (it stays whole), rows that two ranks share evenly, rows that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 6), nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(torch.tanh(self.up(x))) * self.scale)


def clipped_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optim.step()
    optim.zero_grad()
    return loss


@pytest.mark.ranks(4)
def test_equal_to_replicate(ranks: Ranks) -> None:
    """Ranks start apart: the first rank's values count on all four."""
    mesh = ranks.mesh((2, 2), ("replicate", "shard"))
    flat = ranks.mesh((4,), ("dp",))
    by_style = {}
    for style, where in (("replicate", flat), ("hybrid", mesh)):
        model = models.seeded(Scaled, seed=ranks.rank).double().to(ranks.device)
        optim = ADAMW(model.parameters())
        step = dp.compile(clipped_step, mesh=where, style=style)  # type: ignore[arg-type]  # one of two names
        generator = torch.Generator().manual_seed(3)
        losses = [step(model, optim, models.rows_of(ranks, *models.vectors(generator)))]
        with ranks.delayed():  # what is read before it is there is NaN
            losses += [step(model, optim, models.rows_of(ranks, *models.vectors(generator))) for _ in range(4)]
        by_style[style] = losses, model, step
    losses, model, step = by_style["hybrid"]
    torch.testing.assert_close(losses, by_style["replicate"][0], rtol=1e-12, atol=0)
    pairs: Any = zip(model.parameters(), by_style["replicate"][1].parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-10, atol=1e-14)
    assert step.num_traces == 1
    assert "2 replicas of these ranks" in step.explain()
    text = step.explain("up.weight")
    assert [kind in text for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [True] * 3

    state: Any = get_model_state_dict(model)
    assert len(state) == 5
    assert [type(one) for one in state.values()] == [DTensor] * 5
    assert state["up.weight"].placements == (Replicate(), Shard(0))
    assert state["scale"].placements == (Replicate(), Replicate())
    assert state["up.weight"].device_mesh == mesh
    assert tuple(state["up.weight"].to_local().shape) == (3, 8)


@pytest.mark.ranks(4)
def test_what_is_sent_in_which_group(ranks: Ranks) -> None:
    """As FSDP2 on two axes: a gather and a scatter within a replica, the sum of a shard across replicas."""
    mesh = ranks.mesh((2, 2), ("replicate", "shard"))
    inner = (0, 1) if ranks.rank < 2 else (2, 3)
    outer = (ranks.rank % 2, ranks.rank % 2 + 2)
    model = models.seeded(models.mlp).to(ranks.device)  # 8 x 16 + 16 + 16 x 3 + 3, the last two padded to 4 rows
    optim = ADAMW(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style="hybrid", reshard_after_forward=False, check="never")
    x = torch.ones(4, 8, device=ranks.device)
    step(model, optim, x)
    with ranks.record() as log:
        step(model, optim, x)
    half = 4 * (8 * 16 + 16 + 4 * 17) // 2
    kinds = models.kinds_of(log)
    sent = [(kind, event.ranks, sum(event.bytes_sent)) for kind, event in zip(kinds, log.events, strict=True)]
    assert sent == [("all_gather", inner, half), ("reduce_scatter", inner, half), ("all_reduce", outer, half)]


def test_estimate_for_two_axes() -> None:
    """64 replicas of 2 ranks: what is sent across them is a shard."""
    model = models.mlp()
    settings: dict[str, Any] = {"world": (64, 2), "style": "hybrid", "rank": 127, "reshard_after_forward": False}
    estimate = dp.estimate(models.mean_step, model, ADAMW(model.parameters()), torch.ones(4, 8), **settings)
    assert estimate.world == 128
    half = 4 * (8 * 16 + 16 + 4 * 17) // 2
    sent = [(m.kind, m.ranks, m.sent_bytes) for m in estimate.messages]
    assert sent == [("all_gather", 2, half), ("reduce_scatter", 2, half), ("all_reduce", 64, half)]
    assert "64 replicas of these ranks" in estimate.plan.explain()


@pytest.mark.ranks(4)
def test_against_fsdp(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("replicate", "shard"))
    model, peer = models.seeded(models.mlp).to(ranks.device), models.seeded(models.mlp).to(ranks.device)
    fully_shard(peer, mesh=mesh)
    own, theirs = ADAMW(model.parameters()), ADAMW(peer.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style="hybrid")
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = models.rows_of(ranks, torch.randn(8, 8, generator=generator))
        assert torch.equal(step(model, own, batch), models.mean_step(peer, theirs, batch).detach())
    for one, other in zip(model.parameters(), peer.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())  # type: ignore[attr-defined]  # DTensors


@pytest.mark.ranks(2)
def test_meshes_that_do_not_fit_the_style(ranks: Ranks) -> None:
    with pytest.raises(dp.PlanError, match=r"invalid-mesh.*1 axes.*two axes"):
        dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="hybrid")
    with pytest.raises(dp.PlanError, match=r'invalid-mesh.*2 axes.*mesh\["dp"\], or use style="hybrid"'):
        dp.compile(models.mean_step, mesh=ranks.mesh((2, 1), ("a", "b")), style="fully_shard")
    with pytest.raises(dp.PlanError, match="conflicting-arguments"):
        dp.compile(models.mean_step, mesh=ranks.mesh((2, 1), ("a", "b")), style="hybrid", semantics="global")
