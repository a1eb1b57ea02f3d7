"""Re-point optimizers to the trained parameters.

An optimizer is re-pointed in place: same object, same groups, same order; its state moves along. Schedulers and scalers
with the optimizer are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._shared.stale_parameters import current_parameter, is_stale
from tp_ddp_bridge.layout import is_local_shard
from tp_ddp_bridge.optim.elementwise import is_zero_optimizer, parameters_of, shard_problems
from tp_ddp_bridge.optim.state import as_global, as_local


def as_list(optimizers: Iterable[Optimizer] | Optimizer) -> list[Optimizer]:
    """Return the ``optimizers=`` argument as a list; one optimizer alone will do."""
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers= takes torch.optim.Optimizer objects, found {type(optimizer).__name__}")
    return listed


def repointing_problems(
    optimizers: Iterable[Optimizer],
    is_replaced: Callable[[torch.Tensor], bool],
    is_sharded: Callable[[torch.Tensor], bool],
) -> list[Problem]:
    """Return all problems of optimizers whose parameters are about to be exchanged, or already were."""
    problems: list[Problem] = []
    for optimizer in optimizers:
        if is_zero_optimizer(optimizer) and any(map(is_replaced, parameters_of(optimizer))):
            reason = "its partition and flat buffers hold the parameters that are about to be replaced"
            hint = "build it after the module has been bridged (or undone)"
            problems.append(Problem("unsupported-wrapper", "ZeroRedundancyOptimizer", found=reason, hint=hint))
        problems += shard_problems(optimizer, is_sharded)
    return problems


def repoint(optimizer: Optimizer) -> None:
    """Exchange every replaced parameter of ``optimizer`` for the current one and move its state along."""
    successors: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        old: list[torch.Tensor] = list(group["params"])  # overwritten below
        new = [current_parameter(parameter) for parameter in old]
        successors.update({id(before): after for before, after in zip(old, new, strict=True)})
        group["params"][:] = new  # the same list: others may hold it
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for key, state in states:
        target = successors.get(id(key), key)
        if target is not key and isinstance(state, dict):
            state = {name: _state_like(target, value) for name, value in state.items()}
        optimizer.state[target] = state


def _state_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a state value laid out as ``parameter``: a DTensor, or local for a leaf."""
    if isinstance(parameter, DTensor):
        return as_global(parameter, value)
    return as_local(parameter, value, copies=False) if isinstance(value, DTensor) else value


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> int:
    """Check that ``optimizer`` trains all of ``module`` and works on shards. Communicates nothing.

    Args:
        module: A bridged module, or the DDP around it.
        optimizer: Any optimizer; a ``ZeroRedundancyOptimizer`` counts with all its parameters.

    Returns:
        Number of trainable parameters of ``module`` in the optimizer.

    Raises:
        PlanError: Replaced parameters, trainable parameters missing in it, or an optimizer for
            full matrices: all in one error.
    """
    if not hasattr(optimizer, "param_groups"):
        hint = "the order is check_optimizer(module, optimizer)"
        raise PlanError(Problem("wrong-type", "optimizer", found=type(optimizer).__name__, hint=hint))
    parameters = list(parameters_of(optimizer))
    reason = "the optimizer holds a parameter that the bridge replaced"
    hint = "pass the optimizer as optimizers=, or build it from module.parameters() again"
    problems = [
        Problem("parameter-replaced", f"parameter {index}", found=reason, hint=hint)
        for index, parameter in enumerate(parameters)
        if is_stale(parameter)
    ]
    ids = {id(parameter) for parameter in parameters}  # == on tensors is elementwise
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    reason, hint = "it trains, but the optimizer does not hold it", "add it to a group, or freeze it"
    problems += [
        Problem("not-in-optimizer", name, found=reason, hint=hint)
        for name, parameter in trainable
        if id(parameter) not in ids
    ]
    problems += shard_problems(optimizer, is_local_shard)
    raise_problems(problems, f"{type(optimizer).__name__} does not fit the module")
    return len(trainable)
