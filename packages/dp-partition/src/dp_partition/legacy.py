"""Names of torch 2.1's SPMD data parallelism, over this package's own stages.

The decorator of torch 2.1 calls `dp_partition.compile`, as new code does itself. The other functions partition a graph
from elsewhere, place its model and optimizer, and follow the batch through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensor, FakeTensorMode, new_fake_mode, pytree
from dp_partition.api import compile as compile_step
from dp_partition.nodes import meta_of
from dp_partition.passes.insert_collectives import Mover, erase_tags, local_inputs, record_local_values
from dp_partition.passes.normalize import decompose, eliminate_dead, erase_profiler, merge_aliases
from dp_partition.pipeline import partition_for_rank
from dp_partition.plan.placements import (
    DataParallelStrategy,
    DataParallelStyle,
    NodeType,
    Outputs,
    PlacementSpec,
    PlacementStrategy,
    StrategyType,
    TupleStrategy,
)
from dp_partition.plan.plan import CommConfig, Style, placements_by_style
from dp_partition.runtime.state import local_tensor
from dp_partition.sharding.propagate import NodePlan, StoragePlacements, propagate
from dp_partition.sharding.rule_table import OutputPlacement

__all__ = ["compile", "DataParallel"]


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism over all ranks: ``"replicate"``, ``"fully_shard"``, ``"default"``, or a `DataParallelStyle`."""

    parallel_style: Style | DataParallelStyle = "replicate"


def compile(parallel_mode: DataParallel | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a train step to run data-parallel, each rank with its own rows.

    A decorated function takes ``last_train_step=`` as well, without effect, and has its `Step` as ``.step``.

    Raises:
        PlanError: At the first call, before ``torch.distributed`` was initialised (code ``no-process-group``).
    """
    mode = DataParallel() if parallel_mode is None else parallel_mode
    if not isinstance(mode, DataParallel):
        raise TypeError(f"parallel_mode must be a DataParallel, found {type(mode).__name__}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("last_train_step", None)
            if "step" not in vars(wrapper):  # at the first call torch.distributed is ready
                if not dist.is_available() or not dist.is_initialized():
                    raise PlanError(
                        Problem(
                            "no-process-group",
                            found="torch.distributed is not set up",
                            hint="call torch.distributed.init_process_group first",
                        )
                    )
                modules = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)]
                device = next((p.device.type for module in modules for p in module.parameters()), "cpu")
                mesh = init_device_mesh(device, (dist.get_world_size(),))  # all ranks, as in torch 2.1
                vars(wrapper)["step"] = compile_step(function, mesh=mesh, style=mode.parallel_style)
            return vars(wrapper)["step"](*args, **kwargs)

        return wrapper

    return decorate


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
    """Partition a train step traced at all ranks' batch together, and place its tensors.

    The model's parameters and the optimizer's state become DTensors, in ``optimizer.param_groups`` too;
    ``params_buffers`` and ``named_states`` hold the local tensors afterwards, in the order of the graph's placeholders.
    Ranks are expected to hold equal values.

    Args:
        graph: The traced step; its first placeholders are the values of ``params_buffers``, then those of
            ``named_states``, then the batch. Changed in place.
        model: The module with the parameters and buffers.
        optimizer: Its optimizer, if any.
        params_buffers: Parameters and buffers by full name.
        named_states: Optimizer state by parameter name.
        args: The step's arguments; the graph is enough, they are not used.
        kwargs: The step's keyword arguments; likewise.
        mesh: One-dimensional mesh.
        parallel_style: ``DEFAULT``, ``REPLICATE`` or ``FULLY_SHARD``.
        input_batch_dim: The batch dim of the batch's tensors.

    Returns:
        The graph of this rank, nodes with ``meta["node_type"]``. The tensors are placed only after success.
    """
    num_params = len(params_buffers)
    num_states = len(pytree.tree_leaves(named_states))
    if eliminate_dead(graph.graph):  # the code must match the graph
        graph.recompile()
    strategies = build_data_parallel_strategies(graph, num_params, num_states, mesh=mesh, batch_dim=input_batch_dim)
    mark_data_parallel_shardings(graph, num_params, num_states, strategies, parallel_style)
    for node, strategy in strategies.items():
        single = isinstance(strategy, DataParallelStrategy)
        meta_of(node)["node_type"] = strategy.node_type if single else NodeType.NON_TENSOR  # type: ignore[union-attr]
    partitioned = partitioner(graph)
    # The parameters, buffers and state become DTensors.

    def place(tensor: torch.Tensor) -> torch.Tensor:
        own = [placements_by_style(tuple(tensor.shape), parallel_style, mesh.size())[0]]
        return distribute_tensor(tensor.detach(), mesh, own, src_data_rank=None)  # ranks hold equal values

    replaced: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[torch.Tensor, str] = {}
    for name, tensor in list(params_buffers.items()):
        if tensor not in replaced:  # tied tensors once
            names[tensor], placed = name, place(tensor)
            is_param = isinstance(tensor, nn.Parameter)
            replaced[tensor] = nn.Parameter(placed, tensor.requires_grad) if is_param else placed
        params_buffers[name] = local_tensor(replaced[tensor].detach())
    for module in model.modules():
        tables: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
        for table in tables:
            table.update({key: replaced[x] for key, x in table.items() if x is not None and x in replaced})
    for group in [] if optimizer is None else optimizer.param_groups:
        listed = [param for param in group["params"] if param in replaced]
        group["params"] = [replaced.get(param, param) for param in group["params"]]
        for param in [param for param in listed if param in optimizer.state]:  # type: ignore[union-attr]
            state: dict[Any, Any] = optimizer.state.pop(param)  # type: ignore[union-attr]
            entries = named_states.get(names[param], {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = place(value)
                if key in entries:
                    entries[key] = local_tensor(state[key]) if isinstance(state[key], torch.Tensor) else state[key]
            optimizer.state[replaced[param]] = state  # type: ignore[union-attr]
    return partitioned


def mark_data_parallel_shardings(
    train_step_graph: GraphModule,
    num_parameters: int,
    num_states: int,
    dp_strategy_map: dict[fx.Node, StrategyType],
    parallel_mode: DataParallelStyle = DataParallelStyle.FULLY_SHARD,
) -> None:
    """Choose one strategy for every node and write it to ``meta["sharding"]``.

    Args:
        train_step_graph: Graph of the strategies.
        num_parameters: Number of leading placeholders of parameters or buffers.
        num_states: Number of placeholders after them of optimizer state.
        dp_strategy_map: Result of `build_data_parallel_strategies`.
        parallel_mode: ``REPLICATE`` and ``FULLY_SHARD`` take the replicated and the sharded strategy of each node;
            ``DEFAULT`` shards parameters and state that divide evenly and replicates the rest.

    Raises:
        PlanError: Another style (code ``conflicting-arguments``), or a mixture that cannot be distributed.
    """
    if parallel_mode is DataParallelStyle.DEFAULT:
        if not any(item._mixed for item in dp_strategy_map.values()):
            raise PlanError(Problem("no-sharding-strategy", "parallel_mode", found="no way to mix shards and replicas"))
        for node, item in dp_strategy_map.items():
            meta_of(node)["sharding"] = item._mixed
        return
    if parallel_mode not in (DataParallelStyle.REPLICATE, DataParallelStyle.FULLY_SHARD):
        raise PlanError(
            Problem(
                "conflicting-arguments",
                "parallel_mode",
                found=str(parallel_mode),
                hint="use dp_partition.compile for it",
            )
        )
    index = 0 if parallel_mode is DataParallelStyle.REPLICATE else -1  # a single strategy is both
    for node in train_step_graph.graph.nodes:
        strategies = dp_strategy_map[node].strategies
        meta_of(node)["sharding"] = strategies[index] if strategies else None


def partitioner(graph: GraphModule) -> GraphModule:
    """Turn a marked single-device graph into this rank's graph.

    Inserts collectives for inputs wanted in another placement, adapts arguments with shapes,
    removes the markings, and leaves local values in ``meta["val"]``.

    Args:
        graph: A graph marked by `mark_data_parallel_shardings`. Changed in place.

    Returns:
        The same graph module.
    """
    marked = {node: meta_of(node).pop("sharding", None) for node in graph.graph.nodes}
    strategies = {node: item for node, item in marked.items() if isinstance(item, PlacementStrategy)}
    specs = [item.output_spec for item in strategies.values()]
    mesh = next((spec.mesh for spec in specs if isinstance(spec, PlacementSpec)), None)
    if mesh is None:
        raise PlanError(
            Problem(
                "not-sharded",
                "graph",
                found='no node has meta["sharding"]',
                hint="call mark_data_parallel_shardings first",
            )
        )
    world, rank = mesh.size(), mesh.get_local_rank()
    mover = Mover(graph.graph, world, rank, mesh.get_group().group_name)
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    specs_of = [strategies[node].output_spec if node in strategies else None for node in nodes]
    placements = [spec.placement if isinstance(spec, PlacementSpec) else Replicate() for spec in specs_of]
    mode = _fake_mode(graph.graph)  # fakes of one graph share a mode
    inputs = local_inputs(graph.graph, placements, mode, world, rank)
    plans: dict[fx.Node, NodePlan] = {}
    for node, strategy in strategies.items():  # the inverse of `strategy_of`
        pairs = zip(node.all_input_nodes, strategy.input_specs or (), strict=node.op != "placeholder")
        wanted = {source: spec.placement for source, spec in pairs if isinstance(spec, PlacementSpec)}
        is_spec: Any = lambda item: isinstance(item, PlacementSpec)  # noqa: E731
        output = pytree.tree_map(lambda spec: spec and spec.placement, strategy.output_spec, is_leaf=is_spec)
        plans[node] = NodePlan(output, wanted)
    partition_for_rank(graph, plans, mover, CommConfig())
    graph.recompile()
    record_local_values(graph, inputs, mode)
    return graph


def _spec_of(state: OutputPlacement, mesh: DeviceMesh) -> Outputs:
    """Return the spec of a state on a mesh."""
    if isinstance(state, tuple):
        return tuple(_spec_of(item, mesh) for item in state)
    return PlacementSpec(mesh, (state,)) if isinstance(state, Placement) else None


def strategy_of(node: fx.Node, plan: NodePlan, mesh: DeviceMesh) -> PlacementStrategy:
    """Return a node's plan as a strategy, inputs in the order of ``all_input_nodes``."""
    inputs = tuple(_spec_of(plan.inputs.get(source), mesh) for source in node.all_input_nodes)
    return PlacementStrategy(_spec_of(plan.output, mesh), None if node.op == "placeholder" else inputs)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode of a graph's traced values."""
    values = [node.meta.get("val") for node in graph.nodes]
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or new_fake_mode()


def build_data_parallel_strategies(
    train_step_graph: GraphModule, num_params: int, num_states: int, mesh: DeviceMesh, batch_dim: int = 0
) -> dict[fx.Node, StrategyType]:
    """Find all strategies for every node of a train step.

    The graph is brought into canonical form first: gradient tags become notes on the tagged nodes, dead nodes go
    (writes to memory are not dead), and operators without a rule for shards are decomposed.

    Args:
        train_step_graph: The step, traced at the batch of all ranks together. Changed in place.
        num_params: Number of leading placeholders of parameters or buffers.
        num_states: Number of placeholders after them of optimizer state.
        mesh: One-dimensional mesh.
        batch_dim: The batch dim of all other tensor placeholders.

    Returns:
        For every node its type with one strategy, or two: ``[replicated, sharded]``.

    Raises:
        PlanError: The step cannot be distributed.
    """
    if mesh.ndim != 1:
        raise PlanError(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} axes", hint="pass one axis of it"))
    prepare(train_step_graph)
    graph = train_step_graph.graph
    num_fixed = num_params + num_states
    ways = [
        _plan_graph(graph, num_params, num_fixed, mesh.size(), batch_dim, style)
        for style in (DataParallelStyle.REPLICATE, DataParallelStyle.FULLY_SHARD)
    ]
    strategies = {node: _strategies(node, [way[node] for way in ways], mesh) for node in graph.nodes}
    with suppress(PlanError):  # a mixture may need what shards or replicas alone do not
        mixed = _plan_graph(graph, num_params, num_fixed, mesh.size(), batch_dim, DataParallelStyle.DEFAULT)
        for node, item in strategies.items():
            item._mixed = strategy_of(node, mixed[node], mesh) if item.strategies else None
    return strategies


def prepare(module: GraphModule) -> None:
    """Bring a traced step into canonical form, for global semantics."""
    erase_profiler(module.graph)
    erase_tags(module.graph)
    merge_aliases(module.graph)
    eliminate_dead(module.graph)
    decompose(module, _fake_mode(module.graph))


def _plan_graph(
    graph: fx.Graph, num_params: int, num_fixed: int, world: int, batch_dim: int, style: DataParallelStyle
) -> dict[fx.Node, NodePlan]:
    """Propagate with parameters and state placed by a style."""
    storage = StoragePlacements({}, {}, lambda _, shape: placements_by_style(shape, style, world)[0], keep_outputs=True)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            storage.placements[node] = Replicate()
        elif position < num_fixed:
            storage.placements[node] = placements_by_style(tuple(value.shape), style, world)[0]
            storage.types[node] = NodeType.PARAM if position < num_params else NodeType.STATE
        else:
            if value.ndim > batch_dim and value.shape[batch_dim] % world:
                raise PlanError(
                    Problem(
                        "uneven-shards",
                        node.name,
                        dim=batch_dim,
                        found=f"global batch of {value.shape[batch_dim]} rows over {world} ranks",
                        hint="every rank must have as many rows as the others",
                    )
                )
            storage.placements[node] = Shard(batch_dim) if value.ndim > batch_dim else Replicate()
            storage.types[node] = NodeType.ACT
    return propagate(graph, storage, world, local=False)


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
            DataParallelStrategy(kind, [PlacementStrategy(s.output_spec[index]) for s in strategies])  # type: ignore[index]
            for index in range(len(plans[0].output))
        ]
        return TupleStrategy(childs, strategies)
    # In a partial activation the batch was summed or averaged away.
    is_reduced = kind is NodeType.ACT and isinstance(plans[0].output, Partial)
    return DataParallelStrategy(kind, strategies, is_reduced)


NO_BATCH = -1
REDUCED = -2


class BatchDimAnalyzer:
    """Follow the batch dim from the inputs through a graph's operators, never by comparing sizes.

    Args:
        batch_dim: The batch dim of the graph's inputs.

    Attributes:
        batch_dim_map: Dim of each node, ``-1`` for tensors without a batch, ``-2`` after a reduction over the batch.
        batch_dim_size: Size of the global batch, ``-1`` before `init_batch_dim_size`.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim, self.batch_dim_size = batch_dim, -1
        self.batch_dim_map: dict[fx.Node, int] = {}

    def init_batch_dim_size(self, batch_dim_size: int) -> None:
        """Set the size of the batch; it cannot change afterwards."""
        if self.batch_dim_size not in (-1, batch_dim_size):
            raise RuntimeError(f"the batch size is {self.batch_dim_size} already, it cannot become {batch_dim_size}")
        self.batch_dim_size = batch_dim_size

    def set_batch_dim(self, node: fx.Node, batch_dim: int) -> None:
        """Set a node's batch dim."""
        self.batch_dim_map[node] = batch_dim

    def get_batch_dim(self, node: fx.Node) -> int:
        """Return the batch dim of a node that was set or computed."""
        return self.batch_dim_map[node]

    def compute_batch_dim(self, node: fx.Node, full_reduction: bool = False) -> int:
        """Return a node's batch dim; ``full_reduction`` marks the batch as reduced away in this node."""
        if self.batch_dim_size == -1:
            raise RuntimeError("set the batch size first: init_batch_dim_size")
        if full_reduction:
            self.set_batch_dim(node, REDUCED)
        if node not in self.batch_dim_map:
            placeholders = [other for other in node.graph.nodes if other.op == "placeholder"]
            inputs = {other: self.batch_dim_map.get(other, NO_BATCH) for other in placeholders}
            types = {item: NodeType.PARAM if dim == NO_BATCH else NodeType.ACT for item, dim in inputs.items()}
            storage = StoragePlacements({item: _placement_of(dim) for item, dim in inputs.items()}, types)
            for item, plan in propagate(node.graph, storage, 1, local=False).items():  # one rank: no size matters
                self.batch_dim_map.setdefault(item, _dim_of(plan.output))  # dims set by the caller stay
        return self.batch_dim_map[node]

    def compute_act_spec(self, node: fx.Node, mesh: DeviceMesh) -> PlacementSpec:
        """Return an activation's placement: sharded on its batch dim, partial after its reduction, or full."""
        return PlacementSpec(mesh, (_placement_of(self.compute_batch_dim(node)),))


def _placement_of(dim: int) -> Placement:
    return {NO_BATCH: Replicate(), REDUCED: Partial("sum")}.get(dim, Shard(dim))


def _dim_of(output: OutputPlacement) -> int:
    if isinstance(output, tuple):
        return next((dim for dim in map(_dim_of, output) if dim != NO_BATCH), NO_BATCH)
    if isinstance(output, Shard):
        return output.dim
    return REDUCED if isinstance(output, Partial) else NO_BATCH
