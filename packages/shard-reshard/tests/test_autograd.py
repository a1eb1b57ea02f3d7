"""Gradients take the way back: against the formula, against finite differences, twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, plan_reshard, reshard, simulate

SHAPE = (4, 6)
CASES = [
    ("2: S(0)", "2: S(1)"),
    ("2: S(0)", "2: R"),
    ("2: R", "2: S(1)"),
    ("2: P", "2: S(0)"),
    ("2: P(avg)", "2: R"),
    ("rank 1", "2: S(0)"),
    ("2: S(1)", "2: I(0,2)"),
]


@pytest.mark.ranks(2)
def test_backward_is_the_transposed_plan_and_so_is_its_backward(ranks: Ranks) -> None:
    # The second time around in rounds of bounded buffers, forth and back and forth again.
    for src, dst, limit in [(*case, limit) for limit in (None, 96) for case in CASES]:
        plan = plan_reshard(SHAPE, torch.float64, src, dst, max_workspace_bytes=limit)
        args: dict[str, Any] = {"shape": SHAPE, "dtype": torch.float64, "max_workspace_bytes": limit}
        shapes, outs = plan.src.local_shapes(ranks.rank), plan.dst.local_shapes(ranks.rank)
        # A rank without source takes part with an empty tensor that requires grad.
        local = torch.randn(shapes[0] if shapes else (0,), dtype=torch.float64, requires_grad=True)
        weight = torch.randn(outs[0], dtype=torch.float64, requires_grad=True)
        with ranks.delayed():
            moved = reshard(local, src, dst, **args)
            (grad,) = torch.autograd.grad((moved * weight).sum(), local, create_graph=True)
            expected = _transposed(ranks, plan, weight.detach())
            assert torch.equal(grad.detach(), torch.zeros_like(local) if expected is None else expected), (src, dst)
            # d/dweight of <grad, v> is the way forth again.
            v = torch.randn_like(local)
            (second,) = torch.autograd.grad((grad * v).sum(), weight)
            assert torch.equal(second, reshard(v if shapes else None, src, dst, **args))


def _transposed(ranks: Ranks, plan: Any, weight: torch.Tensor) -> torch.Tensor | None:
    moved = simulate(plan.transpose(), ranks.gather(weight))[ranks.rank]
    assert moved is None or isinstance(moved, torch.Tensor)
    return moved


@pytest.mark.ranks(2)
def test_replicated_forward_sums_gradients(ranks: Ranks) -> None:
    local = torch.ones(2, 3, requires_grad=True)
    moved = reshard(local, "2: S(0)", "2: R", shape=(4, 3))
    (moved * (ranks.rank + 1)).sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, torch.full((2, 3), 3.0))


@pytest.mark.ranks(2)
def test_handles_with_gradients_waited_for_out_of_order(ranks: Ranks) -> None:
    locals_ = [torch.full((2, 6), float(at), requires_grad=True) for at in range(3)]
    with ranks.delayed():
        handles = [reshard(t * t, "2: S(0)", "2: S(1)", shape=SHAPE, async_op=True) for t in locals_]
        moved = {at: handles[at].wait() for at in ((2, 0, 1) if ranks.rank else (1, 2, 0))}
        # Backward meets the exchanges in the same order on every rank, whatever order they were waited for in.
        torch.autograd.backward([(moved[at] * (at + 1)).sum() for at in range(3)])
    for at, local in enumerate(locals_):
        assert torch.equal(moved[at].detach(), torch.full((4, 3), float(at * at)))
        assert local.grad is not None
        assert torch.equal(local.grad, torch.full((2, 6), 2.0 * at * (at + 1)))


@pytest.mark.ranks(2)
def test_gradcheck_over_both_ranks(ranks: Ranks) -> None:
    # The input is whole on both ranks and the loss is the sum over ranks, so each rank sees the same function.
    def function(full: torch.Tensor) -> torch.Tensor:
        moved = reshard(full.chunk(2)[ranks.rank], "2: S(0)", "2: S(1)", shape=SHAPE)
        replica = reshard(moved * moved, "2: S(1)", "2: R", shape=SHAPE)
        half: torch.Tensor = replica / 2
        return half  # each rank's replica contributes half of the gradient of the sum

    full = torch.arange(24.0, dtype=torch.float64).view(SHAPE).cos().requires_grad_()
    # One rank's gradient has its own rows only; summing over ranks gives all, which finite differences see too.
    (grad,) = torch.autograd.grad(function(full).sum(), full)
    total = torch.stack(ranks.gather(grad)).sum(0)
    eps = 1e-6
    for at in range(0, 24, 5):
        bump = torch.zeros(24, dtype=torch.float64)
        bump[at] = eps
        with torch.no_grad():
            high, low = function(full + bump.view(SHAPE)).sum(), function(full - bump.view(SHAPE)).sum()
        numeric = sum(ranks.gather(float((high - low) / (2 * eps))))
        assert abs(numeric - float(total.flatten()[at])) < 1e-6  # central differences in float64


@pytest.mark.ranks(2)
def test_what_has_no_gradient_says_so(ranks: Ranks) -> None:
    local = torch.ones(4, 6, requires_grad=True)
    with pytest.raises(PlanError, match="not-differentiable"):
        reshard(local, "2: P(max)", "2: R", shape=SHAPE)
    with pytest.raises(PlanError, match="invalid-out"):
        reshard(local[:2], "2: S(0)", "2: S(1)", shape=SHAPE, out=torch.empty(4, 3))
    with pytest.raises(PlanError, match="ranks-disagree"):
        reshard(local[:2] if ranks.rank else local.detach()[:2], "2: S(0)", "2: I(1,3)", shape=SHAPE)
