"""Partition a traced step, and place the model and optimizer it was traced from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.fx import GraphModule

from dp_partition._torch_compat import pytree
from dp_partition.binding import as_dtensor, local_of, local_part
from dp_partition.canonicalise import eliminate_dead
from dp_partition.data_parallel.marking import mark_data_parallel_shardings, partitioner
from dp_partition.data_parallel.strategies import (
    Chooser,
    build_data_parallel_strategies,
    replicate_all,
    shard_all,
    shard_even,
)
from dp_partition.placements import DataParallelStrategy
from dp_partition.styles import DataParallelStyle, NodeType


def partition_data_parallel(
    graph: GraphModule,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    params_buffers: dict[str, torch.Tensor],
    named_states: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    parallel_style: DataParallelStyle,
    input_batch_dim: int,
) -> GraphModule:
    """Partition a train step that was traced at the batch of all ranks together, and place what it works on.

    The model's parameters and the optimizer's state become DTensors, in ``optimizer.param_groups`` too;
    ``params_buffers`` and ``named_states`` hold the local tensors afterwards, in the order of the graph's placeholders.
    Ranks are expected to hold equal values.

    Args:
        graph: The traced step; its first placeholders are the values of ``params_buffers``, then those of
            ``named_states``, then the batch. Changed in place.
        model: The module that holds the parameters and buffers.
        optimizer: Its optimizer, if there is one.
        params_buffers: Parameters and buffers by full name.
        named_states: Optimizer state by parameter name.
        args: The step's arguments; the graph says all that is needed about them.
        kwargs: The step's keyword arguments; likewise.
        mesh: One-dimensional mesh.
        parallel_style: ``DEFAULT``, ``REPLICATE`` or ``FULLY_SHARD``.
        input_batch_dim: The batch dim of the batch's tensors.

    Returns:
        The graph of this rank, nodes with ``meta["node_type"]``. The tensors are placed only when this succeeded.
    """
    num_params = len(params_buffers)
    num_states = len(pytree.tree_leaves(named_states))
    if eliminate_dead(graph.graph):
        graph.recompile()
    strategies = build_data_parallel_strategies(graph, num_params, num_states, mesh=mesh, batch_dim=input_batch_dim)
    mark_data_parallel_shardings(graph, num_params, num_states, strategies, parallel_style)
    for node, strategy in strategies.items():
        single = isinstance(strategy, DataParallelStrategy)
        node.meta["node_type"] = strategy.node_type if single else NodeType.NON_TENSOR  # type: ignore[union-attr]
    partitioned = partitioner(graph)
    choose: Chooser = {
        DataParallelStyle.REPLICATE: replicate_all,
        DataParallelStyle.FULLY_SHARD: shard_all,
        DataParallelStyle.DEFAULT: shard_even(mesh.size()),
    }[parallel_style]
    place_tensors(model, optimizer, params_buffers, named_states, mesh, choose)
    return partitioned


def place_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    params_buffers: dict[str, torch.Tensor],
    named_states: dict[str, Any],
    mesh: DeviceMesh,
    choose: Chooser,
) -> None:
    """Put DTensors where the parameters, buffers and state were."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[torch.Tensor, str] = {}
    for name, tensor in list(params_buffers.items()):
        if tensor not in replaced:
            names[tensor] = name
            placed = place_one(tensor, mesh, choose(tuple(tensor.shape)))
            is_param = isinstance(tensor, nn.Parameter)
            replaced[tensor] = nn.Parameter(placed, tensor.requires_grad) if is_param else placed
        params_buffers[name] = local_of(replaced[tensor].detach())
    for module in model.modules():
        tables: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
        for table in tables:
            for attribute, tensor in list(table.items()):
                if tensor is not None and tensor in replaced:
                    table[attribute] = replaced[tensor]
    if optimizer is not None:
        _place_optimizer(optimizer, replaced, names, named_states, mesh, choose)


def place_one(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    """A DTensor of which this rank holds its part of ``tensor``."""
    whole = tensor.detach()
    part = local_part(whole, placement, mesh.size(), mesh.get_local_rank())
    return as_dtensor(part, whole, mesh, placement)


def _place_optimizer(
    optimizer: torch.optim.Optimizer,
    replaced: dict[torch.Tensor, torch.Tensor],
    names: dict[torch.Tensor, str],
    named_states: dict[str, Any],
    mesh: DeviceMesh,
    choose: Chooser,
) -> None:
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if param not in replaced:
                continue
            new = replaced[param]
            group["params"][index] = new
            if param not in optimizer.state:
                continue
            state = optimizer.state.pop(param)
            name = names[param]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = place_one(value, mesh, choose(tuple(value.shape)))
                if name in named_states and key in named_states[name]:
                    named_states[name][key] = (
                        local_of(state[key]) if isinstance(state[key], torch.Tensor) else state[key]
                    )
            optimizer.state[new] = state


__all__ = ["partition_data_parallel", "place_tensors"]
