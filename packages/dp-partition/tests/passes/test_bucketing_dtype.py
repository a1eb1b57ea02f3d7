"""The dtype in which gradients are reduced: `reduce_dtype`."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.passes.bucketing import divisors
from ranktest import Ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SGD = partial(torch.optim.SGD, lr=0.5)
SENT = {"replicate": ("all_reduce",), "zero1": ("all_reduce", "all_gather"), "zero2": ("reduce_scatter", "all_gather")}
SENT["fully_shard"] = ("all_gather", "reduce_scatter")


def trained(ranks: Ranks, style: Any, **settings: Any) -> tuple[Any, list[torch.Tensor], Any]:
    """Three steps on 8 x 16 + 16 + 16 x 3 + 3 elements: the step, the parameters, what the last step sent."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = SGD(model.parameters())
    step = dp.compile(
        models.mean_step,
        mesh=ranks.mesh((2,), ("dp",)),
        style=style,
        check="first",
        reshard_after_forward=False,
        **settings,
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = models.rows_of(ranks, torch.randn(8, 8, generator=generator))
        with ranks.record() as log:
            step(model, optim, batch)
    with step.unsharded():
        return step, [p.detach().clone() for p in model.parameters()], log


def by_fsdp(ranks: Ranks, dtype: torch.dtype) -> list[torch.Tensor]:
    model = models.seeded(models.mlp).to(ranks.device)
    fully_shard(model, mesh=ranks.mesh((2,), ("dp",)), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    optim = SGD(model.parameters())
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        models.mean_step(model, optim, models.rows_of(ranks, torch.randn(8, 8, generator=generator)))
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_reduced_in_another_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    """As FSDP2's `MixedPrecisionPolicy(reduce_dtype=)`: bit for bit, whatever the style; half the bytes are sent."""
    expected = by_fsdp(ranks, dtype)
    _, plain, _ = trained(ranks, "replicate")
    assert not all(torch.equal(a, b) for a, b in zip(plain, expected, strict=True)), "the dtype makes a difference"
    for style, ops in SENT.items():
        step, values, log = trained(ranks, style, reduce_dtype=dtype)
        assert [torch.equal(a, b) for a, b in zip(values, expected, strict=True)] == [True] * 4, style
        assert models.kinds_of(log) == ops
        (reduced,) = [event for event in log.events if event.op != "all_gather"]
        scattered = "reduce_scatter" in ops
        numel = 8 * 16 + 16 + (4 if scattered else 3) * (16 + 1)
        assert sum(reduced.bytes_sent) == 2 * numel // (2 if scattered else 1)
        assert str(dtype).endswith(str(reduced.dtype).removeprefix("torch."))
        name = str(dtype).removeprefix("torch.")
        assert f"gradients are reduced in {name}" in step.explain()
        assert f'"reduction": "in {name}"' in step.plan.to_json()
    world = dp.estimate(models.mean_step, *arguments(), world=2, style="zero2", reduce_dtype=dtype)
    assert world.sent_bytes("reduce_scatter") == 8 * 16 + 16 + 4 * (16 + 1)


def arguments() -> tuple[Any, ...]:
    model = models.mlp()
    return model, SGD(model.parameters()), torch.ones(4, 8)


def test_a_sum_in_float16_is_divided_in_two_parts() -> None:
    assert {ranks: divisors(torch.float16, ranks) for ranks in (1, 2, 3, 4, 6, 64, 1024)} == {
        1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 6: (4, 1.5), 64: (8, 8), 1024: (32, 32)
    }  # fmt: skip


def test_a_dtype_that_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(dp.PlanError, match="invalid-argument"):
        dp.estimate(models.mean_step, *arguments(), world=2, style="replicate", reduce_dtype=torch.int32)
