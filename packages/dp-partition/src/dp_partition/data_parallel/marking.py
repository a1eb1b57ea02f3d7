"""Mark shardings and partition: from strategies to the graph of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.fx import GraphModule

from dp_partition._torch_compat import FakeTensor, new_fake_mode
from dp_partition.bucket import Traffic
from dp_partition.collectives import local_shape
from dp_partition.data_parallel.strategies import plan_graph, shard_even
from dp_partition.insert import partition_for_rank
from dp_partition.localise import record_local_values
from dp_partition.mark import strategy_of
from dp_partition.placements import DataParallelStrategy, PlacementSpec, PlacementStrategy, StrategyType
from dp_partition.problems import PlanError, Problem
from dp_partition.styles import DataParallelStyle, NodeType


def mark_data_parallel_shardings(
    train_step_graph: GraphModule,
    num_parameters: int,
    num_states: int,
    dp_strategy_map: dict[fx.Node, StrategyType],
    parallel_mode: DataParallelStyle = DataParallelStyle.FULLY_SHARD,
) -> None:
    """Choose one strategy for every node and write it to ``meta["sharding"]``.

    Args:
        train_step_graph: The graph that the strategies were built for.
        num_parameters: Number of leading placeholders that are parameters or buffers.
        num_states: Number of placeholders after them that are optimizer state.
        dp_strategy_map: What `build_data_parallel_strategies` returned.
        parallel_mode: ``REPLICATE`` and ``FULLY_SHARD`` take the replicated and the sharded strategy of each node;
            ``DEFAULT`` shards parameters and state that divide evenly and replicates the rest.

    Raises:
        PlanError: For another style (code ``style-needs-front-end``), or when the mixture cannot be distributed.
    """
    if parallel_mode is DataParallelStyle.DEFAULT:
        _mark_mixed(train_step_graph.graph, num_parameters, num_states, dp_strategy_map)
        return
    if parallel_mode not in (DataParallelStyle.REPLICATE, DataParallelStyle.FULLY_SHARD):
        hint = "use dp_partition.compile for it"
        raise PlanError(Problem("style-needs-front-end", "parallel_mode", found=str(parallel_mode), hint=hint))
    index = 0 if parallel_mode is DataParallelStyle.REPLICATE else -1
    for node in train_step_graph.graph.nodes:
        strategies = dp_strategy_map[node].strategies
        node.meta["sharding"] = strategies[index] if strategies else None


def _mark_mixed(graph: fx.Graph, num_params: int, num_states: int, strategies: dict[fx.Node, StrategyType]) -> None:
    mesh = mesh_of(strategies)
    batch_dim = next((dim for dim in map(_batch_dim, strategies.items()) if dim is not None), 0)
    plans = plan_graph(graph, num_params, num_params + num_states, mesh.size(), batch_dim, shard_even(mesh.size()))
    for node, plan in plans.items():
        chosen = strategy_of(node, plan, mesh) if strategies[node].strategies else None
        node.meta["sharding"] = chosen


def _batch_dim(item: tuple[fx.Node, StrategyType]) -> int | None:
    node, strategy = item
    if node.op == "placeholder" and isinstance(strategy, DataParallelStrategy) and strategy.node_type is NodeType.ACT:
        placement = _placement(strategy.strategies[0])
        return getattr(placement, "dim", None)
    return None


def _placement(strategy: PlacementStrategy) -> Placement:
    spec = strategy.output_spec
    return spec.placement if isinstance(spec, PlacementSpec) else Replicate()


def mesh_of(strategies: dict[fx.Node, StrategyType]) -> DeviceMesh:
    """The mesh that strategies are for."""
    for strategy in strategies.values():
        for one in strategy.strategies:
            if isinstance(one.output_spec, PlacementSpec):
                return one.output_spec.mesh
    raise PlanError(Problem("nothing-to-place", "dp_strategy_map", found="no tensor in the graph"))


def partitioner(graph: GraphModule) -> GraphModule:
    """Turn a marked single-device graph into this rank's graph.

    Inserts collectives where a node wants an input in another place than it lies, adapts arguments that name shapes,
    removes the markings, and leaves local values in ``meta["val"]``.

    Args:
        graph: A graph marked by `mark_data_parallel_shardings`. Changed in place.

    Returns:
        The same graph module.
    """
    marked = [node.meta.get("sharding") for node in graph.graph.nodes]
    specs = [s.output_spec for s in marked if isinstance(s, PlacementStrategy)]
    mesh = next((spec.mesh for spec in specs if isinstance(spec, PlacementSpec)), None)
    if mesh is None:
        hint = "call mark_data_parallel_shardings first"
        raise PlanError(Problem("not-marked", "graph", found='no node has meta["sharding"]', hint=hint))
    world, rank = mesh.size(), mesh.get_local_rank()
    inputs = _local_inputs(graph, world, rank)
    partition_for_rank(graph, world, rank, mesh.get_group().group_name, Traffic())
    graph.recompile()
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None) or new_fake_mode()
    record_local_values(graph, inputs, mode)
    return graph


def _local_inputs(graph: GraphModule, world: int, rank: int) -> list[Any]:
    """Fake local values of the placeholders."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or new_fake_mode()
    inputs: list[Any] = []
    with mode:
        for node in graph.graph.nodes:
            if node.op != "placeholder":
                continue
            value, strategy = node.meta.get("val"), node.meta.get("sharding")
            if not isinstance(value, torch.Tensor) or strategy is None:
                inputs.append(value)
                continue
            shape = local_shape(tuple(value.shape), _placement(strategy), world, rank)
            inputs.append(torch.empty(shape, dtype=value.dtype, device=value.device))
    return inputs


__all__ = ["mark_data_parallel_shardings", "mesh_of", "partitioner"]
