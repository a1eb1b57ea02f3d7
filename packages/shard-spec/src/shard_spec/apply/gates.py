"""Small autograd functions: what counts in the forward, and what counts in the backward."""

from __future__ import annotations

from typing import Any

import torch


def gate(value: torch.Tensor, *, forward: bool, backward: bool) -> torch.Tensor:
    """``value`` or zeros of its shape; its gradient is handed on or is zeros.

    Every rank keeps the value in its graph, so that hooks on it run everywhere, but only some ranks count.
    """
    made: torch.Tensor = _Gate.apply(value, forward, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.forward_counts, ctx.backward_counts = forward, backward
        return value.view_as(value) if forward else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gate(grads[0], forward=ctx.backward_counts, backward=ctx.forward_counts), None, None
