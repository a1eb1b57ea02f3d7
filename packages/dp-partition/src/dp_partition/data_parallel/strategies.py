"""Build strategies: for every node of a traced step, the ways to distribute it in a data-parallel graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx import GraphModule

from dp_partition._torch_compat import FakeTensor, new_fake_mode
from dp_partition.canonicalise import eliminate_dead, erase_profiler, merge_aliases
from dp_partition.decompose import decompose, remove_tags
from dp_partition.mark import strategy_of
from dp_partition.placements import DataParallelStrategy, Outputs, PlacementStrategy, StrategyType, TupleStrategy
from dp_partition.problems import PlanError, Problem
from dp_partition.propagate import Homes, NodePlan, propagate
from dp_partition.styles import NodeType

Chooser = Callable[[tuple[int, ...]], Placement]


def replicate_all(shape: tuple[int, ...]) -> Placement:
    """Everything whole."""
    return Replicate()


def shard_all(shape: tuple[int, ...]) -> Placement:
    """Everything that has a dim 0 is sharded on it."""
    return Shard(0) if shape else Replicate()


def shard_even(world: int) -> Chooser:
    """What divides evenly is sharded, the rest is whole."""
    return lambda shape: Shard(0) if shape and shape[0] and shape[0] % world == 0 else Replicate()


def build_data_parallel_strategies(
    train_step_graph: GraphModule,
    num_params: int,
    num_states: int,
    mesh: DeviceMesh,
    batch_dim: int = 0,
) -> dict[fx.Node, StrategyType]:
    """Work out how every node of a train step can be distributed.

    The graph is brought into canonical form first: gradient tags become notes on the nodes they tag, dead nodes go
    (writes to memory are not dead), and operators that cannot be run on shards as they are get taken apart.

    Args:
        train_step_graph: The step, traced at the batch of all ranks together. Changed in place.
        num_params: Number of leading placeholders that are parameters or buffers.
        num_states: Number of placeholders after them that are optimizer state.
        mesh: One-dimensional mesh.
        batch_dim: The batch dim of all other tensor placeholders.

    Returns:
        For every node its type with one strategy, or two: ``[replicated, sharded]``.

    Raises:
        PlanError: When the step cannot be distributed.
    """
    if mesh.ndim != 1:
        raise PlanError(Problem("mesh-not-1d", "mesh", found=f"{mesh.ndim} axes", hint="pass one axis of it"))
    prepare(train_step_graph)
    graph = train_step_graph.graph
    num_fixed = num_params + num_states
    ways = [
        plan_graph(graph, num_params, num_fixed, mesh.size(), batch_dim, choose)
        for choose in (replicate_all, shard_all)
    ]
    return {node: _strategies(node, [way[node] for way in ways], mesh) for node in graph.nodes}


def prepare(module: GraphModule) -> None:
    """Canonical form of a traced step, for global semantics."""
    erase_profiler(module.graph)
    remove_tags(module.graph)
    merge_aliases(module.graph)
    eliminate_dead(module.graph)
    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or new_fake_mode()
    decompose(module, mode)


def plan_graph(
    graph: fx.Graph, num_params: int, num_fixed: int, world: int, batch_dim: int, choose: Chooser
) -> dict[fx.Node, NodePlan]:
    """Propagate with parameters and state placed by ``choose``."""
    homes = Homes({}, {}, lambda name, shape: choose(shape), keep_outputs=True)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            homes.placements[node] = Replicate()
        elif position < num_fixed:
            homes.placements[node] = choose(tuple(value.shape))
            homes.types[node] = NodeType.PARAM if position < num_params else NodeType.STATE
        else:
            homes.placements[node] = _batch_placement(node, value, batch_dim, world)
            homes.types[node] = NodeType.ACT
    return propagate(graph, homes, world, local=False)


def _batch_placement(node: fx.Node, value: torch.Tensor, batch_dim: int, world: int) -> Placement:
    if value.ndim <= batch_dim:
        return Replicate()
    if value.shape[batch_dim] % world:
        found = f"global batch of {value.shape[batch_dim]} rows over {world} ranks"
        hint = "every rank must have as many rows as the others"
        raise PlanError(Problem("uneven-batch", node.name, dim=batch_dim, found=found, hint=hint))
    return Shard(batch_dim)


def _strategies(node: fx.Node, plans: list[NodePlan], mesh: DeviceMesh) -> StrategyType:
    strategies: list[PlacementStrategy] = []
    for plan in plans:
        strategy = strategy_of(node, plan, mesh)
        if strategy not in strategies:
            strategies.append(strategy)
    kind = plans[0].node_type
    if not isinstance(node.meta.get("val"), torch.Tensor) and not isinstance(plans[0].output, tuple):
        is_write = node.op == "call_function" and plans[0].inputs
        return DataParallelStrategy(
            kind if is_write else NodeType.NON_TENSOR, strategies if node.op != "placeholder" else []
        )
    if isinstance(plans[0].output, tuple):
        childs = [
            DataParallelStrategy(kind, [PlacementStrategy(_child(s, index)) for s in strategies])
            for index in range(len(plans[0].output))
        ]
        return TupleStrategy(childs, strategies)
    return DataParallelStrategy(kind, strategies, _reduces_batch(node, plans[0]))


def _child(strategy: PlacementStrategy, index: int) -> Outputs:
    assert isinstance(strategy.output_spec, tuple)
    return strategy.output_spec[index]


def _reduces_batch(node: fx.Node, plan: NodePlan) -> bool:
    """A partial activation: the batch was summed or averaged away."""
    return plan.node_type is NodeType.ACT and getattr(plan.output, "is_partial", lambda: False)()
