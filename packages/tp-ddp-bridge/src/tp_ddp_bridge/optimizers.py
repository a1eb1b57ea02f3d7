"""Keeping optimizers on the parameters that really train.

An optimizer is re-pointed in place: same object, same groups, same order; its state moves along. Schedulers and scalers
that hold the optimizer notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ddp_bridge._torch_compat import local_of
from tp_ddp_bridge.layout import layout_of
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.stale import is_stale, stale_name, successor

# They look at a whole matrix or at all parameters at once; on a shard they would compute something else, silently.
NOT_ELEMENTWISE = {
    "LBFGS": "its curvature history runs over all parameters of one process",
    "Adafactor": "its row and column means run over the whole matrix",
    "Muon": "it orthogonalises the whole matrix",
    "Shampoo": "its preconditioners run over the whole matrix",
    "SOAP": "its preconditioners run over the whole matrix",
    "LAMB": "its trust ratio is the norm of the whole parameter",
    "Lamb": "its trust ratio is the norm of the whole parameter",
    "LARS": "its trust ratio is the norm of the whole parameter",
}


def as_list(optimizers: Iterable[Optimizer] | Optimizer) -> list[Optimizer]:
    """The ``optimizers=`` argument as a list; one optimizer alone will do."""
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers= takes torch.optim.Optimizer objects, found {type(optimizer).__name__}")
    return listed


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_problems(optimizer: Optimizer, sharded: Callable[[torch.Tensor], bool]) -> Iterator[Problem]:
    """Whether an optimizer can work on local leaves at all.

    Args:
        optimizer: Any optimizer, ``ZeroRedundancyOptimizer`` included.
        sharded: Whether a parameter is, or becomes, a shard.
    """
    inner = getattr(optimizer, "optim", None)
    for one in [optimizer, *([inner] if isinstance(inner, Optimizer) else [])]:
        kind = next((base.__name__ for base in type(one).__mro__ if base.__name__ in NOT_ELEMENTWISE), None)
        if kind is not None and any(sharded(parameter) for parameter in parameters_of(one)):
            yield Problem(
                "not-elementwise",
                f"optimizers: {type(one).__name__}",
                found=f"it holds sharded parameters, and {NOT_ELEMENTWISE[kind]}",
                hint="use an elementwise optimizer for them (SGD, Adam, AdamW, ...)",
            )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        group = set(dist.get_process_group_ranks(optimizer.process_group))  # type: ignore[attr-defined]  # ZeRO's own
        mixed = [
            index for index, parameter in enumerate(parameters_of(optimizer)) if len(group & _ranks(parameter)) > 1
        ]
        if mixed:
            yield Problem(
                "groups-mix",
                "optimizer: ZeroRedundancyOptimizer",
                found=f"its process_group runs over ranks {sorted(group)}, which hold different shards of parameters "
                f"{mixed}",
                hint="give it the data-parallel group: process_group=ddp.process_group",
            )


def _ranks(parameter: torch.Tensor) -> set[int]:
    """Global ranks that hold parts of a sharded ``parameter``."""
    layout = None if is_stale(parameter) else layout_of(parameter)
    return set() if layout is None or not layout.sharded_axes() else set(layout.mesh.mesh.flatten().tolist())


def repointing_problems(optimizer: Optimizer, replaced: Callable[[torch.Tensor], bool]) -> Iterator[Problem]:
    """Whether the parameters of an existing optimizer can be exchanged.

    Args:
        optimizer: An optimizer given as ``optimizers=``.
        replaced: Whether a parameter is about to be exchanged, or already was.
    """
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and any(map(replaced, parameters_of(optimizer))):
        yield Problem(
            "zero-optimizer",
            "optimizers: ZeroRedundancyOptimizer",
            found="its partition and flat buffers are made of the parameters that are about to be replaced",
            hint="build it after the module has been bridged (or undone)",
        )


def repoint(optimizer: Optimizer) -> int:
    """Exchange every replaced parameter of ``optimizer`` for its successor and move its state along.

    Args:
        optimizer: Changed in place.

    Returns:
        How many parameters were exchanged.
    """
    exchanged = 0
    moved: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        old: list[torch.Tensor] = list(group["params"])
        new = [successor(parameter) for parameter in old]
        exchanged += sum(before is not after for before, after in zip(old, new, strict=True))
        moved.update({id(before): after for before, after in zip(old, new, strict=True)})
        group["params"][:] = new
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for key, state in states:
        target = moved.get(id(key), key)
        if target is not key and isinstance(state, dict):
            state = {name: state_like(target, value) for name, value in state.items()}
        optimizer.state[target] = state
    return exchanged


def state_like(parameter: torch.Tensor, value: Any) -> Any:
    """A state value, laid out as ``parameter``: local for a leaf, a DTensor for a DTensor parameter.

    Only tensors of the parameter's shape are laid out like it; step counters and other values stay what they are.
    """
    layout = layout_of(parameter)
    if layout is None or not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor):
        same = not isinstance(value, DTensor) and value.shape == local_of(parameter).shape and value.dim() > 0
        return layout.wrap(value) if same else value
    if not isinstance(value, DTensor):
        return value
    return layout.localize(value) if value.shape == layout.shape else value.full_tensor()


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> int:
    """Whether ``optimizer`` trains all of ``module`` and works on shards. Communicates nothing.

    Args:
        module: A bridged module, or the DDP around it.
        optimizer: Any optimizer; a ``ZeroRedundancyOptimizer`` counts with all its parameters.

    Returns:
        How many trainable parameters of ``module`` the optimizer holds.

    Raises:
        PlanError: Parameters that were replaced, trainable parameters that it does not hold, or an optimizer that needs
            whole matrices: all in one error.
    """
    held = list(parameters_of(optimizer))
    problems = [
        Problem(
            "stale-parameter",
            stale_name(parameter),
            found="the optimizer holds the parameter that the bridge replaced",
            hint="pass the optimizer as optimizers=, or build it from module.parameters() again",
        )
        for parameter in held
        if is_stale(parameter)
    ]
    ids = {id(parameter) for parameter in held}
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    problems += [
        Problem(
            "not-in-optimizer",
            name,
            found="it trains, but the optimizer does not hold it",
            hint="add it to a group, or freeze it",
        )
        for name, parameter in trainable
        if id(parameter) not in ids
    ]
    problems += optimizer_problems(optimizer, is_sharded)
    if problems:
        raise PlanError(problems, f"{type(optimizer).__name__} does not fit the module")
    return len(trainable)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this rank holds only a part of ``parameter``."""
    if is_stale(parameter):
        return False
    layout = layout_of(parameter)
    return layout is not None and bool(layout.sharded_axes())


def problems_of_all(
    optimizers: Sequence[Optimizer], replaced: Callable[[torch.Tensor], bool], sharded: Callable[[torch.Tensor], bool]
) -> list[Problem]:
    """All problems of the ``optimizers=`` argument."""
    problems: list[Problem] = []
    for optimizer in optimizers:
        problems += repointing_problems(optimizer, replaced)
        problems += optimizer_problems(optimizer, sharded)
    return problems
