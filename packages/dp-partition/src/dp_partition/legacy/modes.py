"""What the decorator can be told: how to partition the graph, and which modules to put in place of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from dp_partition.data_parallel import partition_data_parallel
from dp_partition.legacy.world import whole_world
from dp_partition.problems import PlanError, Problem
from dp_partition.styles import DataParallelStyle, parse_style


class Override:
    """Puts modules in place of others before the step is traced, and changes the partitioned graph afterwards."""

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to use for ``orig_submodule``; itself to keep it."""
        return orig_submodule

    def transform(self, gm: GraphModule, flat_state: list[torch.Tensor]) -> GraphModule:
        """The graph to run for ``gm``; ``flat_state`` are the rank's tensors of parameters, buffers and state."""
        return gm


class ParallelMode(ABC):
    """How a traced step becomes the graph of one rank."""

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
            raise PlanError(Problem("mesh-not-2d", "parallel_style", found="hybrid on one axis", hint=hint))
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
