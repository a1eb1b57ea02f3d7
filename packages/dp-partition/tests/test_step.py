"""`compile` under local semantics: an unmodified train step on every rank's own batch, equal to one device."""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor, Replicate, Shard

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)  # one node: traced in half the time


@pytest.mark.ranks(2)
def test_gpt_with_adamw(ranks: Ranks) -> None:
    for style, optim in (("replicate", ADAMW), ("zero2", FUSED)):
        with models.case(style):
            models.compare_with_one_device(ranks, models.token_step, models.GPT, optim, models.tokens, style=style)


@pytest.mark.ranks(4)
def test_gpt_with_adamw_on_four_ranks(ranks: Ranks) -> None:
    for style in ("default", "fully_shard"):
        step = models.compare_with_one_device(ranks, models.token_step, models.GPT, FUSED, models.tokens, style=style)
        replicated = [p.info.name for p in step.plan.params if p.param == Replicate()]
        assert replicated == (["tokens.weight", "head.weight"] if style == "default" else [])  # 31 rows over 4 ranks


@pytest.mark.ranks(2)
def test_gpt_in_float32_for_20_steps(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model, reference = models.seeded(models.GPT).to(ranks.device), models.seeded(models.GPT)
    own, theirs = FUSED(model.parameters()), FUSED(reference.parameters())
    step = dp.compile(models.token_step, mesh=mesh, style="fully_shard")
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        batch = models.tokens(generator)
        loss = models.mean_over_ranks(ranks, step(model, own, *models.rows_of(ranks, batch)))
        expected = models.token_step(reference, theirs, *batch).detach()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


OPTIMIZERS: dict[str, list[tuple[str, Any]]] = {
    "one after the other": [
        ("replicate", partial(torch.optim.SGD, lr=0.1)),
        ("fully_shard", partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
        ("replicate", partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1)),
        ("replicate", partial(torch.optim.RMSprop, lr=0.01, momentum=0.5)),
        ("fully_shard", partial(torch.optim.Adagrad, lr=0.01)),
    ],
    "in lists": [
        ("zero1", partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)),
        ("replicate", partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
        ("fully_shard", partial(torch.optim.Adam, lr=0.01, foreach=True)),
        ("zero1", partial(torch.optim.Adam, lr=0.01, fused=True)),
        ("fully_shard", partial(torch.optim.AdamW, lr=0.01, foreach=True)),
        ("zero1", partial(torch.optim.AdamW, lr=0.01, fused=True)),
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(ranks: Ranks, kind: str) -> None:
    for style, optim in OPTIMIZERS[kind]:
        with models.case((style, optim)):
            models.compare_with_one_device(ranks, models.mean_step, models.mlp, optim, models.vectors, style=style)


@pytest.mark.ranks(2)
def test_hyperparameters_stay_live_in_every_group(ranks: Ranks) -> None:
    for fused in (False, True):
        with models.case(f"fused: {fused}"):
            hyperparameters_stay_live(ranks, fused)


def hyperparameters_stay_live(ranks: Ranks, fused: bool) -> None:
    mesh = ranks.mesh((2,), ("dp",))

    def optim(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.3}]
        return torch.optim.AdamW(groups, lr=0.01, fused=fused)

    model, reference = models.seeded(models.mlp).double().to(ranks.device), models.seeded(models.mlp).double()
    own, theirs = optim(model), optim(reference)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [0.02, 0.1], total_steps=9) for o in (own, theirs)]
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard")
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        (batch,) = models.vectors(generator)
        loss = models.mean_over_ranks(ranks, step(model, own, models.rows_of(ranks, batch)))
        torch.testing.assert_close(loss, models.mean_step(reference, theirs, batch).detach(), rtol=1e-12, atol=0)
        for schedule in schedules:
            schedule.step()
    assert step.num_traces == 1, "schedules change lr and betas without another trace"
    ids = {id(p) for group in own.param_groups for p in group["params"]}
    assert ids == {id(p) for p in model.parameters()}
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_hyperparameter_that_decides_a_branch_retraces_when_the_branch_changes(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp).double().to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0)
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard")
    x = torch.ones(4, 8, dtype=torch.float64, device=ranks.device)
    for decay, traces in [(0.0, 1), (0.5, 2), (0.25, 2), (0.0, 2)]:
        optim.param_groups[0]["weight_decay"] = decay
        step(model, optim, x)
        assert step.num_traces == traces, decay


@pytest.mark.ranks(2)
def test_tied_frozen_and_scalar_parameters(ranks: Ranks) -> None:
    """The original unties tied weights and breaks on frozen ones."""

    def make() -> nn.Module:
        model = models.GPT(tied=True)
        model.positions.weight.requires_grad_(False)
        return model

    def optim(params: Any) -> torch.optim.Optimizer:
        return FUSED([p for p in params if p.requires_grad])

    step = models.compare_with_one_device(ranks, models.token_step, make, optim, models.tokens, style="fully_shard")
    model: Any = runner_of(step).bound().step_state.modules[0][1]
    assert model.head.weight is model.tokens.weight
    assert step.plan["head.weight"].info.name == "tokens.weight"
    assert "also registered as head.weight" in step.explain("head.weight")


@pytest.mark.ranks(2)
def test_clipping_uses_the_norm_over_all_shards(ranks: Ranks) -> None:
    for style in ("replicate", "fully_shard"):
        with models.case(style):
            clips_by_the_norm(ranks, style)


def clips_by_the_norm(ranks: Ranks, style: str) -> None:
    def function(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        loss: Any = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optim.step()
        optim.zero_grad()
        return loss

    step = models.compare_with_one_device(ranks, function, models.mlp, FUSED, models.vectors, style=style)
    names = [str(node.target) for node in step.graph.graph.nodes]
    assert sum("all_reduce" in name for name in names) == 1, "of the gradients' bucket, or of the norm of shards"
    assert any("all_reduce_" in name for name in names) == (style == "replicate")


@pytest.mark.ranks(2)
def test_two_backwards_are_reduced_once(ranks: Ranks) -> None:
    def function(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        first: Any = model(x[: x.shape[0] // 2]).square().mean()
        first.backward()
        second: Any = model(x[x.shape[0] // 2 :]).abs().mean()
        second.backward()
        optim.step()
        optim.zero_grad()
        return first + second

    mesh = ranks.mesh((2,), ("dp",))
    model, alone = models.seeded(models.mlp).double().to(ranks.device), models.seeded(models.mlp).double()
    own, theirs = FUSED(model.parameters()), FUSED(alone.parameters())
    step = dp.compile(function, mesh=mesh, style="replicate")
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        loss = step(model, own, x.to(ranks.device))  # the same rows on every rank: the average is the rank's own
        torch.testing.assert_close(loss.cpu(), function(alone, theirs, x).detach(), rtol=1e-12, atol=0)
    names = [str(node.target) for node in step.graph.graph.nodes]
    assert sum("all_reduce" in name for name in names) == 1, "one bucket, after the second backward"


@pytest.mark.ranks(2)
def test_placements_by_name(ranks: Ranks) -> None:
    step = models.compare_with_one_device(
        ranks, models.token_step, models.GPT, FUSED, models.tokens,
        style="replicate", placements={"blocks.*.up.*": Shard(0), "norm.*": Replicate()},
    )  # fmt: skip
    sharded = [p.info.name for p in step.plan.params if isinstance(p.param, Shard)]
    assert sharded == ["blocks.0.up.weight", "blocks.0.up.bias"]
