"""`compile` under local semantics: an unmodified train step on every rank's own batch, equal to one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition.step import runner_of
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)  # one node: traced in half the time


# The original fails here as shipped: AVG on gloo raises, and the second call of a fully sharded graph fails.
@pytest.mark.ranks(2)
def test_gpt_with_adamw(ranks: Ranks) -> None:
    for style, optim in (("replicate", ADAMW), ("zero2", FUSED)):
        with models.case(style):
            models.compare_with_one_device(ranks, models.token_step, models.GPT, optim, models.tokens, style=style)


@pytest.mark.ranks(4)
def test_gpt_with_adamw_on_four_ranks(ranks: Ranks) -> None:
    for style in ("default", "fully_shard"):
        step = models.compare_with_one_device(ranks, models.token_step, models.GPT, FUSED, models.tokens, style=style)
        whole = [p.info.name for p in step.plan.params if p.param == Replicate()]
        assert whole == (["tokens.weight", "head.weight"] if style == "default" else [])  # 31 rows over 4 ranks


# In float32 the ranks' sums differ from one device's in the last bits; 20 steps of AdamW stay within 1e-5.
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


# The original: foreach Adam goes NaN at step 2, Adam on CPU breaks, state needs a warm-up step.
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


# The original burns the learning rate in, keeps the old parameters in param_groups and sees only group 0.
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
    held = {id(p) for group in own.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
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


TRAFFIC = {  # style -> collectives of one step with one bucket of each kind, in order
    "replicate": ("all_reduce",),
    "zero1": ("all_reduce", "all_gather"),
    "zero2": ("reduce_scatter", "all_gather"),
    "fully_shard": ("all_gather", "reduce_scatter"),
    "default": ("all_gather", "all_reduce", "reduce_scatter"),  # the last layer's gradient comes first
}


@pytest.mark.ranks(2)
def test_what_lies_on_a_rank_and_what_is_sent(ranks: Ranks) -> None:
    """4 x 6 elements that divide evenly, 7 x 4 that do not: live bytes and collectives are those of the style."""
    for style in TRAFFIC:
        with models.case(style):
            lies_and_is_sent(ranks, style)


def lies_and_is_sent(ranks: Ranks, style: str) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 7, bias=False)).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style=style)
    x = torch.ones(3, 6, device=ranks.device)
    step(model, optim, x)
    with ranks.record() as log:
        step(model, optim, x)
    even, uneven, rows = 4 * 6, 7 * 4, (4, 3)[ranks.rank]
    whole, shard = even + uneven, even // 2 + rows * 4
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    states = [s for state in optim.state.values() for s in state.values() if s.ndim > 0]
    mixed = even // 2 + uneven
    expected = {"replicate": (whole, whole), "zero1": (whole, shard), "zero2": (whole, shard),
                "fully_shard": (shard, shard), "default": (mixed, mixed)}[style]  # fmt: skip
    assert len(states) == 4
    assert (held, sum(s.to_local().numel() for s in states)) == (expected[0], 2 * expected[1])
    assert step.plan.param_bytes(ranks.rank) == 4 * held
    assert models.kinds_of(log) == TRAFFIC[style]
    padded = 4 * (even + 8 * 4)  # uneven shards travel padded to 8 rows
    sent = {
        "replicate": [4 * whole],
        "zero1": [4 * whole, padded // 2],
        "zero2": [padded // 2, padded // 2],
        "fully_shard": [padded // 2, padded // 2],
        "default": [4 * even // 2, 4 * uneven, 4 * even // 2],
    }[style]
    assert [sum(event.bytes_sent) for event in log.events] == sent


@pytest.mark.ranks(2)
def test_buckets_change_messages_and_not_results(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    results, counts = [], []
    for bucket_mb in (25, 2 / 1024, 0):
        model = models.seeded(models.GPT).to(ranks.device)
        optim = FUSED(model.parameters())
        settings: dict[str, Any] = {"bucket_mb": bucket_mb, "prefetch": 2, "reshard_after_forward": False}
        step = dp.compile(models.token_step, mesh=mesh, style="fully_shard", **settings)
        batch = models.tokens(torch.Generator().manual_seed(ranks.rank))
        step(model, optim, *models.rows_of(ranks, batch))
        with ranks.record() as log:
            loss = step(model, optim, *models.rows_of(ranks, batch))
        results.append([loss, *(p.to_local() for p in model.parameters())])  # type: ignore[attr-defined]
        counts.append(len(log.events))
    assert counts[0] == 2 < counts[1] < counts[2] == 2 * 17
    for other in results[1:]:
        assert [torch.equal(a, b) for a, b in zip(results[0], other, strict=True)] == [True] * 18  # two ranks: bitwise


@pytest.mark.ranks(2)
def test_equal_to_ddp_bit_for_bit(ranks: Ranks) -> None:
    for style in ("replicate", "fully_shard"):
        with models.case(style):
            equal_to_ddp(ranks, style)


def equal_to_ddp(ranks: Ranks, style: str) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model, plain = models.seeded(models.GPT).to(ranks.device), models.seeded(models.GPT).to(ranks.device)
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=mesh.get_group())
    own, theirs = FUSED(model.parameters()), FUSED(ddp.parameters())
    step = dp.compile(models.token_step, mesh=mesh, style=style)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        batch = models.rows_of(ranks, models.tokens(generator))
        assert torch.equal(step(model, own, *batch), models.token_step(ddp, theirs, *batch).detach())
    with step.unsharded():
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        assert [torch.equal(a, b) for a, b in pairs] == [True] * 17


@pytest.mark.ranks(2)
def test_accumulation_reduces_once_and_equals_one_big_batch(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    for parts in (2, 4):
        step = models.compare_with_one_device(
            ranks, models.mean_step, models.mlp, FUSED, models.vectors, style="fully_shard", accumulate=parts
        )
        model, optim = models.seeded(models.mlp).double(), None
        optim = FUSED(model.parameters())
        step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard", accumulate=parts)
        x = torch.ones(4, 8, dtype=torch.float64, device=ranks.device)
        step(model.to(ranks.device), optim, x)
        with ranks.record() as log:
            step(model, optim, x)
        assert models.kinds_of(log) == ("all_gather", "reduce_scatter")
        with pytest.raises(dp.PlanError, match="uneven-batch"):
            step(model, optim, x[:3])


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
    with pytest.raises(dp.PlanError, match="not-started"):
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
    step = dp.compile(failing_step, mesh=mesh, style="replicate")
    x = torch.ones(4, 8, device=ranks.device) * (1 + ranks.rank)
    step(model, optim, x, torch.tensor([0, 1], device=ranks.device))
    before = [t.clone() for t in (*model.state_dict().values(), *(s for d in optim.state.values() for s in d.values()))]
    if ranks.device.type == "cpu":  # on a GPU an assertion in a kernel ends the process
        with pytest.raises(IndexError) as caught:
            step(model, optim, x, torch.tensor([0, 99]))
        assert "as they were before the step" in "".join(caught.value.__notes__)
    after = [*model.state_dict().values(), *(s for d in optim.state.values() for s in d.values())]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 19


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5)


@pytest.mark.ranks(2)
def test_random_streams(ranks: Ranks) -> None:
    for rng in ("same", "per_rank"):
        with models.case(rng):
            random_streams(ranks, rng)


def random_streams(ranks: Ranks, rng: str) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(Noisy).to(ranks.device)
    step = dp.compile(models.mean_step, mesh=mesh, style="replicate", rng=rng)
    state = torch.get_rng_state()
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = [step(model, optim, torch.ones(4, 8, device=ranks.device)).item() for _ in range(3)]
    assert torch.equal(state, torch.get_rng_state()), "the caller's generator is left alone"
    assert len(set(losses)) == 3
    first, second = ranks.gather(losses)
    assert (first == second) == (rng == "same")


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
def test_tied_frozen_and_scalar_parameters(ranks: Ranks) -> None:
    """The original unties tied weights and breaks on frozen ones."""

    def make() -> nn.Module:
        model = models.GPT(tied=True)
        model.positions.weight.requires_grad_(False)
        return model

    def optim(params: Any) -> torch.optim.Optimizer:
        return FUSED([p for p in params if p.requires_grad])

    step = models.compare_with_one_device(ranks, models.token_step, make, optim, models.tokens, style="fully_shard")
    model: Any = runner_of(step).bound().subject.modules[0][1]
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
    with pytest.raises(dp.PlanError, match="not-started"):
        _ = step.plan


@pytest.mark.ranks(2)
def test_ranks_that_start_apart_can_be_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp, seed=ranks.rank).to(ranks.device)
    before = list(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, equal="check")
    with pytest.raises(dp.PlanError, match="ranks-differ") as caught:
        step(model, FUSED(model.parameters()), torch.ones(4, 8, device=ranks.device))
    assert len(caught.value.problems) == 4
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_placements_by_name(ranks: Ranks) -> None:
    step = models.compare_with_one_device(
        ranks, models.token_step, models.GPT, FUSED, models.tokens,
        style="replicate", placements={"blocks.*.up.*": Shard(0), "norm.*": Replicate()},
    )  # fmt: skip
    sharded = [p.info.name for p in step.plan.params if isinstance(p.param, Shard)]
    assert sharded == ["blocks.0.up.weight", "blocks.0.up.bias"]
