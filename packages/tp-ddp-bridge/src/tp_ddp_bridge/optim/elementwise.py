"""Optimizers of models with local shards: tried on a small tensor before they step, and looked through for groups.

The trial is that of `_shared/elementwise`. It happens once for each optimizer that holds shards, at its first step
(torch's global step pre-hook) or in ``check_optimizer``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tp_ddp_bridge._shared.elementwise import elementwise_problems
from tp_ddp_bridge._shared.problems import Problem, raise_problems
from tp_ddp_bridge._shared.stale_parameters import is_stale
from tp_ddp_bridge.layout import is_local_shard, layout_of

_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_zero_optimizer(optimizer: Optimizer) -> bool:
    """Return whether this is torch's ``ZeroRedundancyOptimizer``; importing it to ask would warn."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def shard_problems(optimizer: Optimizer, is_sharded: Callable[[torch.Tensor], bool]) -> list[Problem]:
    """Return everything that keeps ``optimizer`` from working on local shards.

    Args:
        optimizer: Any optimizer, ``ZeroRedundancyOptimizer`` included.
        is_sharded: Whether a parameter is, or becomes, a local shard.
    """
    problems: list[Problem] = []
    if is_zero_optimizer(optimizer):
        problems += _zero_group_problems(optimizer)
    return [*problems, *elementwise_problems(optimizer, is_sharded)]


@functools.cache
def check_at_first_step() -> None:
    """From now on try each optimizer that holds local shards at its first step; installed once for the process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:  # groups only grow
        return
    raise_problems(shard_problems(optimizer, is_local_shard), f"{type(optimizer).__name__} cannot work on shards")
    _checked[optimizer] = count


def _zero_group_problems(optimizer: Any) -> Iterator[Problem]:
    group = set(dist.get_process_group_ranks(optimizer.process_group))
    mixed = [index for index, each in enumerate(parameters_of(optimizer)) if len(group & _shard_ranks(each)) > 1]
    if mixed:
        yield Problem(
            "mesh-mismatch",
            "optimizer: ZeroRedundancyOptimizer",
            found=f"its process_group runs over ranks {sorted(group)}, which hold different shards of parameters "
            f"{mixed}",
            hint="give it the data-parallel group: process_group=ddp.process_group",
        )


def _shard_ranks(parameter: torch.Tensor) -> set[int]:
    layout = None if is_stale(parameter) else layout_of(parameter)
    return set() if layout is None or not layout.sharded_axes() else set(layout.mesh.mesh.flatten().tolist())
