"""What lies on a rank and what travels, style by style, and that neither changes the numbers."""

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

FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)  # one node: traced in half the time


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


def lies_and_is_sent(ranks: Ranks, style: Any) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 7, bias=False)).to(ranks.device)
    optim = FUSED(model.parameters())
    step = dp.compile(models.mean_step, mesh=mesh, style=style, check="never", reshard_after_forward=False)
    x = torch.ones(3, 6, device=ranks.device)
    step(model, optim, x)
    with ranks.record() as log:
        step(model, optim, x)
    even, uneven, rows = 4 * 6, 7 * 4, (4, 3)[ranks.rank]
    full, shard = even + uneven, even // 2 + rows * 4
    local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    states = [s for state in optim.state.values() for s in state.values() if s.ndim > 0]
    mixed = even // 2 + uneven
    expected = {"replicate": (full, full), "zero1": (full, shard), "zero2": (full, shard),
                "fully_shard": (shard, shard), "default": (mixed, mixed)}[style]  # fmt: skip
    assert len(states) == 4
    assert (local, sum(s.to_local().numel() for s in states)) == (expected[0], 2 * expected[1])
    assert step.plan.param_bytes(ranks.rank) == 4 * local
    assert models.kinds_of(log) == TRAFFIC[style]
    padded = 4 * (even + 8 * 4)  # uneven shards travel padded to 8 rows
    sent = {
        "replicate": [4 * full],
        "zero1": [4 * full, padded // 2],
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
        step = dp.compile(models.token_step, mesh=mesh, style="fully_shard", check="never", **settings)
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


def equal_to_ddp(ranks: Ranks, style: Any) -> None:
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
        step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard", accumulate=parts, check="never")
        x = torch.ones(4, 8, dtype=torch.float64, device=ranks.device)
        step(model.to(ranks.device), optim, x)
        with ranks.record() as log:
            step(model, optim, x)
        assert models.kinds_of(log) == ("all_gather", "reduce_scatter")
        with pytest.raises(dp.PlanError, match="uneven-shards"):
            step(model, optim, x[:3])
