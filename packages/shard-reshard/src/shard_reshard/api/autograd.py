"""Autograd: gradients move by the transposed plan, and may be differentiated again."""

from __future__ import annotations

from typing import Any

import torch

from shard_reshard._shared.problems import Problem
from shard_reshard.execution.mover import Finish, Mover


def gradient_problems(mover: Mover, has_out: bool) -> list[Problem]:
    """Return the reasons that gradients cannot flow through."""
    problems = []
    for plan in mover.plans:
        if plan.reduce_op in ("min", "max", "product"):
            reason = f"a reduction by {plan.reduce_op}"
            hint = "detach() the tensor; gradients flow through sums and averages"
            problems.append(Problem("not-differentiable", "src", found=reason, hint=hint))
    if has_out:
        hint = "leave out= away, or call under torch.no_grad()"
        problems.append(Problem("invalid-out", "out", found="a source that requires grad", hint=hint))
    return problems


def differentiable_start(
    mover: Mover, tensors: list[torch.Tensor], async_op: bool
) -> tuple[list[torch.Tensor], Finish | None]:
    """Like ``mover.start``, for tensors that require grad.

    A rank without source tensors passes one empty tensor, and a rank without destination gets one: they keep the rank
    in the graph, so that it joins the exchange of gradients.
    """
    finishing: list[Finish | None] = []
    outs = _Move.apply(mover, async_op, finishing, *tensors)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return list(outs), finishing[0]


class _Move(torch.autograd.Function):
    """A linear map of all ranks' tensors; its derivative is the transposed plan, by the same class."""

    @staticmethod
    def forward(ctx: Any, mover: Mover, async_op: bool, finishing: list[Any], *tensors: torch.Tensor) -> Any:
        num_sources = len(mover.exchange.program.src_shapes)
        sources = list(tensors[:num_sources])
        outs, finish = mover.start(sources, None, async_op)
        finishing.append(finish)  # apply() returns tensors only
        ctx.mover, ctx.token = mover, (None if num_sources else tensors[0])
        if not outs:
            outs = [tensors[0].new_empty(0)]  # an output that requires grad: backward runs here too
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients, finish = differentiable_start(ctx.mover.transposed, list(grads), False)
        if finish is not None:
            finish()  # gradients are read right after
        if ctx.token is not None:
            gradients = [gradients[0].reshape(ctx.token.shape)]  # empty, but it keeps this rank in the graph
        return None, None, None, *gradients
