"""Checks of optimizers with local shards, at their steps.

Before its first step, and whenever its groups have grown, an optimizer with local shards has to be elementwise
(see ``_shared/elementwise``), as in ``check_optimizer``. At steps 1, 2, 4, 8, ... ranks compare the gradients of
replicated parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tp_ddp_bridge._shared.consensus import named_collective
from tp_ddp_bridge._shared.elementwise import elementwise_problems
from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._shared.stale_parameters import is_stale
from tp_ddp_bridge.layout import as_plain, is_local_shard, layout_of, refuse_full_reads, tensor_groups

_checked: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Number of parameters and of steps that were seen."""

_stepping: weakref.WeakKeyDictionary[Optimizer, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""Leaves that are ordinary parameters for a step. After a step that raised they are so until the next."""

_LAST = 1024
"""The last step at which gradients are compared."""


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_zero_optimizer(optimizer: Optimizer) -> bool:
    """Return True for torch's ``ZeroRedundancyOptimizer``; importing it for this would warn."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def shard_problems(optimizer: Optimizer, is_sharded: Callable[[torch.Tensor], bool]) -> list[Problem]:
    """Return everything that keeps ``optimizer`` from working on parameters that are, or become, local shards."""
    problems: list[Problem] = []
    if is_zero_optimizer(optimizer):
        problems += _zero_group_problems(optimizer)
    return [*problems, *elementwise_problems(optimizer, is_sharded)]


@functools.cache
def check_steps() -> None:
    """Check each optimizer with local shards at its steps; installed once for the process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = list(parameters_of(optimizer))
    if torch.compiler.is_compiling() or any(is_stale(each) for each in parameters):
        return  # a stale parameter raises in the step
    count, step = _checked.get(optimizer, (0, 0))
    if count != len(parameters):  # groups only grow
        raise_problems(shard_problems(optimizer, is_local_shard), f"{type(optimizer).__name__} cannot work on shards")
    _checked[optimizer] = len(parameters), step + 1
    if is_zero_optimizer(optimizer):  # its inner optimizer holds other parameters on each rank, on some none
        _checked.setdefault(cast(Any, optimizer).optim, (0, _LAST))
    # A norm over its limit shows early, and a scheduler's period is seldom a power of two.
    if (step + 1) & step == 0 and step < _LAST and any(map(is_local_shard, parameters)):
        _compare_replicated_gradients(parameters)
    leaves = as_plain(parameters)
    if leaves and optimizer not in _stepping:
        # Optimizers without leaves get no hook: a graph of a step (dp-partition's) depends on its optimizer's hooks.
        optimizer.register_step_post_hook(_after_step)
    if leaves or optimizer in _stepping:
        _stepping[optimizer] = [*_stepping.get(optimizer, ()), *leaves]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    leaves = _stepping.get(optimizer, [])  # none of a twin, which has the hooks of its original
    for leaf in leaves:
        refuse_full_reads(leaf)
    leaves.clear()


def _compare_replicated_gradients(parameters: list[torch.Tensor]) -> None:
    """Raise, on all ranks of a group, for gradients scaled unequally, as by torch's clip."""
    for group in tensor_groups(parameters, sharded=True):
        ranks = dist.get_process_group_ranks(group)
        replicated = [each for each in parameters if _is_replicated_over(each, ranks)]
        norms = torch.stack([_norm(each) for each in replicated]) if replicated else None
        if norms is None or norms.is_meta or type(norms) is not torch.Tensor:
            continue  # fake tensors have no values
        rows = [torch.empty_like(norms) for _ in ranks]
        with named_collective("the comparison of gradients at an optimizer's step"):
            dist.all_gather(rows, norms, group=group)
        table = torch.stack(rows)  # ranks x parameters
        spread, largest = table.amax(0) - table.amin(0), table.amax(0)
        # Ranks may sum in another order. Norms far below the others are rounding alone.
        unequal = (spread > 1e-3 * largest) & (largest > 1e-5 * largest.max())
        for index in unequal.nonzero().flatten().tolist():
            shape = tuple(replicated[index].shape)
            raise PlanError(
                Problem(
                    "gradients-differ",
                    f"a parameter of shape {shape}",
                    found=f"gradient norms {table[:, index].tolist()} on ranks {ranks}, where all hold the same"
                    " parameter",
                    hint="clip with tp_ddp_bridge.clip_grad_norm_: torch's takes the norm of one rank's shards",
                )
            )


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    if grad is None or isinstance(grad, DTensor) or grad.layout != torch.strided:
        return torch.zeros((), device=parameter.device)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(grad.detach(), dtype=dtype)
    return norm.float()


def _is_replicated_over(parameter: torch.Tensor, ranks: list[int]) -> bool:
    layout = layout_of(parameter)
    return layout is not None and any(
        placement.is_replicate() and dist.get_process_group_ranks(layout.mesh.get_group(axis)) == ranks
        for axis, placement in enumerate(layout.placements)
    )


def _zero_group_problems(optimizer: Any) -> Iterator[Problem]:
    group = set(dist.get_process_group_ranks(optimizer.process_group))
    mixed = [index for index, each in enumerate(parameters_of(optimizer)) if len(group & _shard_ranks(each)) > 1]
    if mixed:
        yield Problem(
            "mesh-mismatch",
            "optimizer: ZeroRedundancyOptimizer",
            found=f"its process_group runs over ranks {sorted(group)}, which hold different shards of parameters"
            f" {mixed}",
            hint="give it the data-parallel group: process_group=ddp.process_group",
        )


def _shard_ranks(parameter: torch.Tensor) -> set[int]:
    layout = None if is_stale(parameter) else layout_of(parameter)
    return set() if layout is None or not layout.sharded_axes() else set(layout.mesh.mesh.flatten().tolist())
