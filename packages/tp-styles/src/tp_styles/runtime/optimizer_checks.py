"""Checks of sharded models' optimizers before a step.

A local shard has a gradient and a shape like any parameter: an optimizer for full matrices runs on it
without an error. Fused and foreach kernels take either DTensors or plain tensors.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tp_styles._shared.elementwise import elementwise_problems
from tp_styles._shared.stale_parameters import is_stale
from tp_styles._torch_compat import is_compiling
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.parameters import ShardParameter

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def check_optimizers() -> None:
    """From now on check each optimizer before its first step; installed once for the process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling() or optimizer in _checked:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_meta or is_stale(p) for p in parameters):
        return  # a stale one raises in the step
    _checked.add(optimizer)
    problems = [] if not any(map(_is_shard, parameters)) else elementwise_problems(optimizer, _is_shard)
    for group in optimizer.param_groups:
        kinds = {isinstance(p, DTensor): p for p in group["params"]}
        if len(kinds) == 2 and (group.get("fused") or group.get("foreach")):
            kernels = "fused=True" if group.get("fused") else "foreach=True"
            reason = f"{kernels} on DTensors and plain tensors (one of shape {tuple(kinds[False].shape)})"
            hint = 'apply_plan(..., rest="replicated") makes DTensors of parameters without a style'
            if isinstance(kinds[False], ShardParameter):
                hint = "sections of a fused weight are no DTensors: leave it out, or give them a group of their own"
            name = f"optimizer: {type(optimizer).__name__}"
            problems.append(Problem("mixed-parameters", name, found=reason, hint=hint))
    if problems:
        _checked.discard(optimizer)  # raise again in the next step
        raise PlanError(problems)


def _is_shard(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardParameter)
