"""Optimizers of local shards, at their steps: each has to go element by element, on equal gradients of replicas.

A local shard has a gradient and a shape like any parameter. An optimizer that works on full matrices, and a gradient
norm of one rank's shards, go through without an error, and part the replicas of everything that is not sharded.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tp_styles._shared.elementwise import elementwise_problems
from tp_styles._shared.stale_parameters import is_stale
from tp_styles._torch_compat import is_compiling
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.parameters import ShardParameter

RTOL = 1e-3
"""Of the norm of a replica's gradient: ranks may sum in another order."""

LAST = 1024
"""The last step of which gradients are compared; steps before it are powers of two."""

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


@functools.cache
def check_optimizers() -> None:
    """From now on look at optimizers of local shards; installed once for the process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    ShardParameter.in_step = False  # a step that raised has left it
    if is_compiling():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shards = [p for p in parameters if isinstance(p, ShardParameter)]
    if not any(_is_sharded(p) for p in shards) or any(p.is_meta or is_stale(p) for p in shards):
        return  # a stale one raises in the step
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if step == 1 and (problems := elementwise_problems(optimizer, _is_sharded)):
        raise PlanError(problems)
    # A scheduler's or a sampler's period is seldom a power of two, and a norm that is exceeded comes early.
    if step & (step - 1) == 0 and step <= LAST:
        _compare_replicas(shards)
    # A closure may compute norms: its gradients refuse them, at some host time. `args` holds the optimizer too.
    ShardParameter.in_step = len(args) == 1 and not kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    ShardParameter.in_step = False


def _compare_replicas(shards: list[ShardParameter]) -> None:
    """See that gradients of replicated parameters are equal on all ranks.

    Raises:
        PlanError: Some are not; on every rank.
    """
    replicas = [p for p in shards if not p._sharding_info.placements[0].is_shard()]
    for mesh in dict.fromkeys(p._sharding_info.mesh for p in shards):
        own = [p for p in replicas if p._sharding_info.mesh == mesh]
        norms = [None if p.grad is None else float(torch.linalg.vector_norm(p.grad.detach())) for p in own]
        everyone = TPGroup(mesh).all_gather_objects(norms, "the first step of an optimizer")
        for index, parameter in enumerate(own):
            values = [norm[index] or 0.0 for norm in everyone]
            if max(values) - min(values) > RTOL * max(values):
                hint = "clip with tp_styles.clip_grad_norm_: torch's takes the norm of one rank's shards, and scales"
                hint += " replicas otherwise on each rank"
                shape = tuple(parameter.shape)
                found = f"norms {values} of the gradient of a replicated parameter of shape {shape}"
                raise PlanError(Problem("gradients-differ", "optimizer", found=found, hint=hint))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardParameter) and parameter.is_partial
