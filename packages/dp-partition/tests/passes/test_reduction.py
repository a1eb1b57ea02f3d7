"""How gradients are reduced: `reduce_dtype` and `comm_hook`."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition.passes.reduction import division
from ranktest import Ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SGD = partial(torch.optim.SGD, lr=0.5)
SENT = {"replicate": ("all_reduce",), "zero1": ("all_reduce", "all_gather"), "zero2": ("reduce_scatter", "all_gather")}
SENT["fully_shard"] = ("all_gather", "reduce_scatter")


def trained(ranks: Ranks, style: Any, **settings: Any) -> tuple[Any, list[torch.Tensor], Any]:
    """Three steps on 8 x 16 + 16 + 16 x 3 + 3 elements: the step, the parameters, what the last step sent."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = SGD(model.parameters())
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style=style, check="first", **settings)
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
        step, found, log = trained(ranks, style, reduce_dtype=dtype)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 4, style
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
    assert {ranks: division(ranks) for ranks in (1, 2, 3, 4, 6, 64, 1024)} == {
        1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 6: (4, 1.5), 64: (8, 8), 1024: (32, 32)
    }  # fmt: skip


def partial_of(hook: Any) -> Any:
    """The hook under a name that DDP does not know: it refuses its own bfloat16 hook without NCCL."""
    return lambda group, bucket: hook(group, bucket)


@pytest.mark.ranks(2)
def test_hooks_are_those_of_ddp(ranks: Ranks) -> None:
    """The original has none; DDP's run beside the graph. Ours are part of it, and equal to DDP's bit for bit."""
    pairs = [(dp.bf16_compress, default_hooks.bf16_compress_hook), (dp.fp16_compress, default_hooks.fp16_compress_hook)]
    for ours, theirs in pairs:
        model = models.seeded(models.mlp).to(ranks.device)
        mesh = ranks.mesh((2,), ("dp",))
        ddp = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
        ddp.register_comm_hook(mesh.get_group(), partial_of(theirs))
        optim = SGD(model.parameters())
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            models.mean_step(ddp, optim, models.rows_of(ranks, torch.randn(8, 8, generator=generator)))
        for style, bucket_mb in (("replicate", 25), ("fully_shard", 25), ("zero2", 0)):
            step, found, log = trained(ranks, style, comm_hook=ours, bucket_mb=bucket_mb)
            assert [torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True)] == [True] * 4
            (dtype,) = {str(event.dtype) for event in log.events if event.op != "all_gather"}
            assert dtype.endswith("bfloat16" if ours is dp.bf16_compress else ".float16")
            assert f"by {ours.__name__}" in step.explain()


def largest_only(bucket: torch.Tensor, group: dp.GradientGroup) -> torch.Tensor:
    kept = torch.where(bucket.abs() >= bucket.abs().mean(), bucket, 0.0)
    return group.average(kept) * 2


@pytest.mark.ranks(2)
def test_a_hook_of_ones_own(ranks: Ranks) -> None:
    _, found, log = trained(ranks, "replicate", comm_hook=largest_only)
    model = models.seeded(models.mlp).to(ranks.device)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = torch.randn(8, 8, generator=generator)
        total: list[Any] = []
        for rank in range(2):
            model(batch[4 * rank : 4 * rank + 4].to(ranks.device)).square().mean().backward()
            flat = torch.cat([p.grad.reshape(-1) for p in reversed(list(model.parameters()))])  # type: ignore[union-attr]
            total.append(torch.where(flat.abs() >= flat.abs().mean(), flat, 0.0))
            model.zero_grad()
        mean = (total[0] + total[1]) / 2 * 2
        with torch.no_grad():
            for p in reversed(list(model.parameters())):
                p.sub_(0.5 * mean[: p.numel()].view_as(p))
                mean = mean[p.numel() :]
    for one, other in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert log.ops == ("all_reduce",)


STATE = torch.zeros(195)


def test_hooks_and_dtypes_that_are_refused() -> None:
    def estimate(**settings: Any) -> None:
        dp.estimate(models.mean_step, *arguments(), world=2, style="replicate", **settings)

    hooks: dict[str, Any] = {
        "python-state": lambda bucket, group: group.average(bucket + STATE),
        "cannot-accumulate": lambda bucket, group: group.average(bucket)[:-1],
        "not-traceable": lambda bucket, group: bucket if bucket.sum() > 0 else -bucket,
    }
    for code, hook in hooks.items():
        with pytest.raises(dp.PlanError, match=code):
            estimate(comm_hook=hook)
    with pytest.raises(dp.PlanError, match="invalid-argument"):
        estimate(reduce_dtype=torch.int32)
    with pytest.raises(dp.PlanError, match="conflicting-arguments"):
        estimate(reduce_dtype=torch.bfloat16, comm_hook=dp.bf16_compress)
    with pytest.raises(dp.PlanError, match="cannot-accumulate"):
        estimate(comm_hook=dp.bf16_compress, semantics="global")
