"""Losses over shards against torch's on the full tensors: values and gradients in float64."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_styles as tp
from ranktest import Ranks
from torch.distributed.device_mesh import DeviceMesh
from tp_styles import losses

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
CLASSES = 11


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks(2, 3, timeout=300)
def test_sharded_sequences(ranks: Ranks) -> None:
    """Reductions, weights, smoothing, the shift; a rank without targets adds zero; no targets at all give NaN."""
    n, rank = ranks.world_size, ranks.rank
    mesh, length = ranks.mesh((n,), ("cp",)), 4 * n
    count = 0
    for masked in (0, 5, length):
        target = torch.randint(0, CLASSES, (2, length), generator=torch.Generator().manual_seed(3))
        target[:, :masked] = -100
        for shift in (False, True):
            full = torch.cat([target[:, 1:], torch.full((2, 1), -100)], 1) if shift else target
            for weight in (None, drawn(2, CLASSES).abs()):
                for smoothing in (0.0, 0.1):
                    for reduction in ("mean", "sum", "none"):
                        options: dict[str, Any] = {
                            "weight": weight,
                            "label_smoothing": smoothing,
                            "reduction": reduction,
                        }
                        alone = drawn(1, 2, length, CLASSES).requires_grad_()
                        mine = alone.detach().chunk(n, 1)[rank].clone().requires_grad_()
                        wanted = F.cross_entropy(alone.flatten(0, 1), full.flatten(), **options)
                        found = tp.sharded_cross_entropy(
                            mine,
                            target.chunk(n, 1)[rank],
                            mesh=mesh,
                            shift=shift,
                            **options,
                        )
                        if reduction == "none":
                            wanted = wanted.view(2, length)
                            torch.testing.assert_close(found, wanted.chunk(n, 1)[rank], **EXACT)
                        else:
                            torch.testing.assert_close(found, wanted, **EXACT, equal_nan=True)
                        found.sum().backward()
                        wanted.sum().backward()
                        if not (masked == length and reduction == "mean"):
                            assert alone.grad is not None
                            torch.testing.assert_close(mine.grad, alone.grad.chunk(n, 1)[rank], **EXACT)
                        count += 1
    assert count == 72
    with pytest.raises(tp.PlanError, match=r"shape-mismatch\] target"):
        tp.sharded_cross_entropy(drawn(1, 2, 4, CLASSES), torch.zeros(2, 5, dtype=torch.long), mesh=mesh)


@pytest.mark.ranks(2, 4, timeout=300)
def test_sharded_vocabularies(ranks: Ranks) -> None:
    """Log-sum-exp, z-loss, log-probabilities, entropy: uneven shards, a rank without classes, classes of -inf."""
    n, rank = ranks.world_size, ranks.rank
    mesh = ranks.mesh((n,), ("tp",))
    for classes in (CLASSES, 5 if n == 4 else 1):  # a rank without classes
        target = torch.randint(0, classes, (2, 3), generator=torch.Generator().manual_seed(1))
        size = -(-classes // n)
        for closed in (False, True):
            alone = drawn(1, 2, 3, classes) * 30
            if closed and classes > 2:
                alone[0, 0, 1] = -torch.inf
                target[0, 0] = 0
            alone.requires_grad_()
            mine = alone.detach()[..., rank * size : (rank + 1) * size].clone().requires_grad_()
            logs = alone.log_softmax(-1)
            parts = logs.exp() * logs.masked_fill(logs.isinf(), 0)
            pairs = [
                (losses.vocab_parallel_logsumexp(mine, mesh=mesh), alone.logsumexp(-1)),
                (losses.vocab_parallel_logsumexp(mine, mesh=mesh).square(), alone.logsumexp(-1).square()),
                (
                    losses.vocab_parallel_log_probs(mine, target, mesh=mesh, num_classes=classes),
                    logs.gather(-1, target[..., None])[..., 0],
                ),
                (losses.vocab_parallel_entropy(mine, mesh=mesh), -parts.sum(-1)),
            ]
            for found, wanted in pairs:
                torch.testing.assert_close(found, wanted, **EXACT)
                (gradient,) = torch.autograd.grad(found.sum(), mine, retain_graph=True)
                (full,) = torch.autograd.grad(wanted.sum(), alone, retain_graph=True)
                ours = full[..., rank * size : (rank + 1) * size]
                torch.testing.assert_close(gradient.nan_to_num(), ours.nan_to_num(), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, timeout=120)
def test_a_rank_that_waits_for_a_refusal_names_the_loss(ranks: Ranks) -> None:
    """One rank alone refuses its target. The other waits until the group's timeout, then names the call and itself."""
    group = dist.new_group(timeout=timedelta(seconds=3), use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    tokens, target = drawn(1, 2, 4, CLASSES), torch.zeros(2, 4 + 3 * ranks.rank, dtype=torch.long)
    for loss in (tp.sharded_cross_entropy, tp.vocab_parallel_cross_entropy):
        with pytest.raises(tp.PlanError if ranks.rank else RuntimeError) as error:
            loss(tokens, target, mesh=mesh)
        texts = ranks.gather(str(error.value))
        assert texts[0].startswith(f"{loss.__name__} over the mesh axis tp: all_reduce failed on rank 0: another rank")
        assert "[shape-mismatch] target" in texts[1]
