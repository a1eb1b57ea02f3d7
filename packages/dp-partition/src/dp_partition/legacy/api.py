"""The decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dp_partition._torch_compat import pytree
from dp_partition.binding import local_of
from dp_partition.capture.subject import find_subject
from dp_partition.legacy.modes import DataParallel, Override, ParallelMode
from dp_partition.legacy.world import whole_world
from dp_partition.runner import Runner
from dp_partition.settings import Settings
from dp_partition.step import Step, runner_of


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: Callable[[GraphModule], GraphModule] | None = None,
    parallel_mode: ParallelMode | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a train step so that it trains data-parallel on all ranks.

    Every rank calls the decorated function with its own rows of the batch. Gradients are averaged over the ranks, as
    torch 2.1 did, whatever the loss: a mean over equal batches trains as one device does on all rows, a sum as
    DistributedDataParallel. Results are this rank's own. The first call traces; parameters become DTensors, ranks take
    rank 0's values.

    Args:
        module_override: Modules to put in place of others before tracing, passes over the graph after partitioning.
        gm_transformation: A pass over the partitioned graph.
        parallel_mode: A `DataParallel`; replicated when not given.

    Returns:
        The decorator. A decorated function takes ``last_train_step=`` as well, for which nothing is to be done any
        more, and has its `Step` as ``.step`` after the first call.
    """
    mode = DataParallel() if parallel_mode is None else parallel_mode
    if not isinstance(mode, DataParallel):
        raise TypeError(f"parallel_mode must be a DataParallel, found {type(mode).__name__}")
    overrides = list(module_override or [])

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("last_train_step", None)
            step: Step | None = wrapper.__dict__.get("step")
            if step is None:
                step = _make_step(function, args, kwargs, mode, overrides, gm_transformation)
                result = step(*args, **kwargs)
                wrapper.__dict__["step"] = step
                return result
            return step(*args, **kwargs)

        return wrapper

    return decorate


def _make_step(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: DataParallel,
    overrides: list[Override],
    transformation: Callable[[GraphModule], GraphModule] | None,
) -> Step:
    modules = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)]
    for module in modules:
        _override_modules(module, overrides)
    subject = find_subject(function, args, kwargs)
    mesh = whole_world(subject.modules[0][1])

    def passes(module: GraphModule) -> GraphModule:
        for override in overrides:
            module = override.transform(module, _flat_state(step))
        module = mode.transform_and_compile(module)
        return transformation(module) if transformation is not None else module

    settings = Settings(mode.parallel_style, "local", batch_dim=mode.input_batch_dim)
    step = Step(Runner(function, mesh, settings, passes=passes))
    return step


def _override_modules(root: nn.Module, overrides: list[Override]) -> None:
    for override in overrides:
        for fqn, module in list(root.named_modules()):
            new = override.replacement(fqn, module)
            if new is not module and fqn:
                root.set_submodule(fqn, new)


def _flat_state(step: Step) -> list[torch.Tensor]:
    """The rank's tensors of parameters, buffers and state; empty before they are placed."""
    binding = runner_of(step).binding
    if binding is None:
        return []
    params = [local_of(param.detach()) for param in binding.params.values()]
    states = [value for _, _, state in binding.states() for value in state.values() if isinstance(value, torch.Tensor)]
    return [*params, *binding.subject.buffers.values(), *map(local_of, states)]
