"""Write decisions onto the graph: ``meta["sharding"]`` and ``meta["node_type"]`` of every node."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dp_partition.placements import Outputs, PlacementSpec, PlacementStrategy
from dp_partition.propagate import NodePlan
from dp_partition.rules.table import State


def spec_of(state: State, mesh: DeviceMesh) -> Outputs:
    """The spec of a state on a mesh."""
    if isinstance(state, tuple):
        return tuple(spec_of(one, mesh) for one in state)
    return PlacementSpec(mesh, (state,)) if isinstance(state, Placement) else None


def strategy_of(node: fx.Node, plan: NodePlan, mesh: DeviceMesh) -> PlacementStrategy:
    """A node's plan as a strategy, inputs in the order of ``all_input_nodes``."""
    if node.op == "placeholder":
        return PlacementStrategy(spec_of(plan.output, mesh))
    inputs = tuple(spec_of(plan.inputs.get(source), mesh) for source in node.all_input_nodes)
    return PlacementStrategy(spec_of(plan.output, mesh), inputs)


def mark_graph(plans: dict[fx.Node, NodePlan], mesh: DeviceMesh) -> None:
    """Mark every planned node."""
    for node, plan in plans.items():
        node.meta["sharding"] = strategy_of(node, plan, mesh)
        node.meta["node_type"] = plan.node_type
        if plan.fallback:
            node.meta["fallback"] = True
