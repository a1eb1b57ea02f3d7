"""Under torch.compile the exchange is one custom operator, declared as having effects.

A functional operator whose result is unused on one rank would be dropped there, and the other ranks would wait for
ever. An effect can be neither dropped nor reordered.
"""

from __future__ import annotations

from typing import Any

import torch

from shard_reshard._torch_compat import declare_ordered_effect
from shard_reshard.local_tensors import local_problems
from shard_reshard.members import data_device
from shard_reshard.mover import Mover

_movers: dict[str, Mover] = {}


def operator_key(mover: Mover) -> tuple[str, int, str]:
    """The name under which the operator finds ``mover`` in this process, its number of results, and the device of a
    rank that has no source tensor to tell it.
    """
    (plan,) = mover.plans
    key = f"{plan.digest[:16]}@{mover.members.group.group_name}@{mover.check}"
    if (
        key not in _movers or _movers[key].members.group is not mover.members.group
    ):  # without a kept workspace: compiled calls may overlap eager ones of the same Resharder
        _movers[key] = Mover(mover.plans, mover.members, False, mover.check)
    return key, len(plan.dst.local_shapes(mover.members.rank)), str(data_device(mover.members.group))


@torch.library.custom_op("shard_reshard::exchange", mutates_args=())
def exchange(tensors: list[torch.Tensor], key: str, transposed: bool) -> list[torch.Tensor]:
    """Move tensors by the plans of the mover called ``key``."""
    mover = _mover(key, transposed)
    program = mover.exchange.program
    sources = list(tensors[: len(program.src_shapes)])
    problems = mover.problems([sources], None)
    mover.agree(problems, mover.device(tensors))
    outs, finish = mover.start(sources, None, False)
    finish()
    return outs or [tensors[0].new_empty(0)]


@exchange.register_fake
def _(tensors: list[torch.Tensor], key: str, transposed: bool) -> list[torch.Tensor]:
    mover = _mover(key, transposed)
    (plan,) = mover.plans
    rank = mover.members.rank
    problems = local_problems(plan, rank, tensors[: len(plan.src.local_shapes(rank))])
    if problems:
        from shard_reshard.problems import PlanError

        raise PlanError(problems)
    dtype = plan.torch_dtypes()[2]
    shapes = plan.dst.local_shapes(rank)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape in shapes] or [tensors[0].new_empty(0)]


def _mover(key: str, transposed: bool) -> Mover:
    return _movers[key].transposed if transposed else _movers[key]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key, ctx.transposed = inputs
    ctx.num_inputs = len(tensors)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, None, None]:
    found = exchange(list(grads), ctx.key, not ctx.transposed)
    return list(found), None, None


exchange.register_autograd(_backward, setup_context=_remember)
declare_ordered_effect("shard_reshard::exchange")
