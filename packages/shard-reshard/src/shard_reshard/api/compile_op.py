"""The exchange as a custom operator with side effects, for torch.compile.

A functional operator with an unused result on one rank would be eliminated there, and its peers would wait for ever.
An effect can be neither dropped nor reordered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import declare_ordered_effect
from shard_reshard.execution.checks import local_problems
from shard_reshard.execution.mover import Mover, memo, remember
from shard_reshard.group import data_device
from shard_reshard.layout.shard_map import Index, torch_dtype


class Operator(NamedTuple):
    """Constants of a traced call."""

    key: str  # key of the operator's mover in this process
    shapes: tuple[Index, ...]  # of the results
    dtype: torch.dtype  # of the results
    device: str  # for a rank without source tensors


def operator_of(mover: Mover) -> Operator:
    """Return the operator of ``mover``."""
    (plan,), group = mover.plans, mover.members.group
    key = f"{plan.digest[:16]}@{group.group_name}@{mover.check}"
    if key not in memo.get(group, {}).get("operator", {}):
        # Without a kept workspace: compiled calls may overlap eager ones of the same Resharder.
        remember(group, "operator", key, Mover(mover.plans, mover.members, False, mover.check))
    shapes = plan.dst.local_shapes(mover.members.rank)
    return Operator(key, shapes, torch_dtype(plan.out_dtype), str(data_device(group)))


def mismatch(outs: list[torch.Tensor], operator: Operator) -> str:
    """Why ``outs`` cannot be copied to, in words that a tracer takes; "" where they can. A copy would broadcast."""
    wanted = [(shape, operator.dtype) for shape in operator.shapes]
    same = [(tuple(out.shape), out.dtype) for out in outs] == wanted
    return "" if same else "another number, shape or dtype of tensors than the layout has"


@torch.library.custom_op("shard_reshard::exchange", mutates_args=())
def exchange(tensors: list[torch.Tensor], key: str, transposed: bool, mismatch: str) -> list[torch.Tensor]:
    """Move tensors by the plans of the mover called ``key``; a ``mismatch`` of ``out`` raises on all ranks."""
    mover = _mover(key, transposed)
    program = mover.exchange.program
    sources = list(tensors[: len(program.src_shapes)])
    problems = mover.problems([sources], None)
    if mismatch:
        hint = "pass tensors of the destination's shape and dtype"
        problems.append(Problem("shape-mismatch", f"rank {mover.members.rank}, out", found=mismatch, hint=hint))
    mover.assert_consistent(problems, mover.device(tensors))
    outs, _ = mover.start(sources, None, False)
    return outs or [tensors[0].new_empty(0)]


@exchange.register_fake
def _(tensors: list[torch.Tensor], key: str, transposed: bool, mismatch: str) -> list[torch.Tensor]:
    mover = _mover(key, transposed)
    (plan,) = mover.plans
    rank = mover.members.rank
    problems = local_problems(plan, rank, tensors[: len(plan.src.local_shapes(rank))])
    if problems:
        raise PlanError(problems)
    dtype = torch_dtype(plan.out_dtype)
    shapes = plan.dst.local_shapes(rank)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape in shapes] or [tensors[0].new_empty(0)]


def _mover(key: str, transposed: bool) -> Mover:
    # A group that was destroyed may still be there, with the name of its successor.
    tables = [kinds.get("operator", {}) for kinds in reversed(list(memo.values()))]
    mover: Mover = next(table[key] for table in tables if key in table)
    return mover.transposed if transposed else mover


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key, ctx.transposed, _ = inputs
    ctx.num_inputs = len(tensors)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, None, None, None]:
    gradients = exchange(list(grads), ctx.key, not ctx.transposed, "")
    return list(gradients), None, None, None


exchange.register_autograd(_backward, setup_context=_remember)
declare_ordered_effect("shard_reshard::exchange")
