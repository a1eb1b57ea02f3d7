"""Optimizers on shards: torch's elementwise ones by their class, others by their word alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared.elementwise import ELEMENTWISE, elementwise_problems, is_elementwise
from torch import nn


class ScaledAdam(torch.optim.Adam):
    """Torch's Adam after a trust ratio of its own: a step of its own makes it another optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / p.grad.norm())
        super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Steps an inner optimizer twice, as a sharpness-aware one does: its inner one's word is not its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})


class Renamed(torch.optim.AdamW):
    """Torch's AdamW with other defaults."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*ELEMENTWISE, Renamed], ids=lambda kind: kind.__name__)
def test_known_optimizers_are_elementwise(kind: Any, dtype: torch.dtype) -> None:
    """Twelve steps on a tensor are those of its halves, along every dim, bit for bit but for vector lanes."""
    compared = 0
    for ndim in (1, 2, 3):
        full = torch.linspace(-1.0, 1.5, 6**ndim, dtype=dtype).sin().view((6,) * ndim)
        for dim in range(ndim):
            parts = [full, *full.chunk(2, dim)]
            parameters = [nn.Parameter(part.clone()) for part in parts]
            optimizers = [kind([parameter], lr=0.1) for parameter in parameters]
            for step in range(12):
                grad = (full * (step + 1)).cos()
                for parameter, optimizer, part in zip(parameters, optimizers, [grad, *grad.chunk(2, dim)], strict=True):
                    assert is_elementwise(optimizer)
                    parameter.grad = part.clone()
                    optimizer.step()
            moved = torch.cat([parameter.detach() for parameter in parameters[1:]], dim)
            torch.testing.assert_close(parameters[0].detach(), moved, rtol=1e-5, atol=1e-6)
            assert not torch.equal(moved, full)
            compared += moved.numel()
    assert compared == 6 + 2 * 36 + 3 * 216


def test_others_are_elementwise_by_their_word_alone() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    others: list[Any] = [
        torch.optim.LBFGS([parameter]),
        torch.optim.Adafactor([parameter]),
        Wrapper(torch.optim.SGD([parameter])),
        ScaledAdam([parameter]),
    ]
    for optimizer in others:
        assert [p.code for p in elementwise_problems(optimizer, lambda p: p is parameter)] == ["not-elementwise"]
        assert not elementwise_problems(optimizer, lambda p: False)  # it holds no shard
        optimizer.is_elementwise = True
        assert not elementwise_problems(optimizer, lambda p: p is parameter)
    adam: Any = torch.optim.Adam([parameter])
    adam.is_elementwise = False  # hooks of its own scale by norms
    assert not is_elementwise(adam)
