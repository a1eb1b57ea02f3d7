"""The decorator."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.api import Step, runner_of
from dp_partition.capture.state import find_step_state
from dp_partition.legacy.graph_interface import partition_data_parallel
from dp_partition.plan.placements import DataParallelStyle, parse_style
from dp_partition.plan.settings import Settings
from dp_partition.runner import Runner
from dp_partition.runtime.state import local_tensor


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
    step_state = find_step_state(function, args, kwargs)
    mesh = whole_world(step_state.modules[0][1])

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
    params = [local_tensor(param.detach()) for param in binding.params.values()]
    states = [value for _, _, state in binding.states() for value in state.values() if isinstance(value, torch.Tensor)]
    return [*params, *binding.step_state.buffers.values(), *map(local_tensor, states)]


class Override:
    """Puts modules in place of others before the step is traced, and changes the partitioned graph afterwards."""

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to use for ``orig_submodule``; itself to keep it."""
        return orig_submodule

    def transform(self, gm: GraphModule, flat_state: list[torch.Tensor]) -> GraphModule:
        """The graph to run for ``gm``; ``flat_state`` are the rank's tensors of parameters, buffers and state."""
        return gm


class ParallelMode(ABC):
    """Conversion of a traced step to the graph of one rank."""

    @abstractmethod
    def partition(
        self,
        gm: GraphModule,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        params_and_buffers: dict[str, torch.Tensor],
        named_states: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> GraphModule:
        """Partition a traced step and place the model's and optimizer's tensors."""

    @abstractmethod
    def transform_and_compile(self, gm: GraphModule) -> GraphModule:
        """Passes over the partitioned graph."""


class DataParallel(ParallelMode):
    """Data parallelism over all ranks.

    Args:
        parallel_style: ``"replicate"``, ``"fully_shard"``, ``"default"`` or a `DataParallelStyle`.
        input_batch_dim: The batch dim of the step's tensor arguments.
        custom_passes: A pass over the partitioned graph.
    """

    def __init__(
        self,
        parallel_style: str | DataParallelStyle = "replicate",
        *,
        input_batch_dim: int = 0,
        custom_passes: Callable[[GraphModule], GraphModule] | None = None,
    ) -> None:
        self.parallel_style = parse_style(parallel_style)
        if self.parallel_style is DataParallelStyle.HYBRID:
            hint = "use dp_partition.compile with a mesh of two axes"
            raise PlanError(Problem("invalid-mesh", "parallel_style", found="hybrid on one axis", hint=hint))
        self.input_batch_dim = input_batch_dim
        self.custom_passes = custom_passes

    def partition(
        self,
        gm: GraphModule,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        params_and_buffers: dict[str, torch.Tensor],
        named_states: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> GraphModule:
        """See `partition_data_parallel`; the mesh is all ranks, on the device of the model."""
        mesh: DeviceMesh = whole_world(model)
        return partition_data_parallel(
            gm,
            model,
            optimizer,
            params_and_buffers,
            named_states,
            args,
            kwargs,
            mesh,
            self.parallel_style,
            self.input_batch_dim,
        )

    def transform_and_compile(self, gm: GraphModule) -> GraphModule:
        """Apply the custom passes."""
        return self.custom_passes(gm) if self.custom_passes is not None else gm


def whole_world(model: nn.Module) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, on the kind of device that the model is on.

    Raises:
        PlanError: Before ``torch.distributed`` was initialised (code ``no-process-group``).
    """
    if not dist.is_available() or not dist.is_initialized():
        hint = "call torch.distributed.init_process_group first"
        raise PlanError(Problem("no-process-group", found="torch.distributed is not initialised", hint=hint))
    tensor = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0))
    return init_device_mesh(tensor.device.type, (dist.get_world_size(),))
