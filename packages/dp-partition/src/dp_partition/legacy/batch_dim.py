"""Batch dim of each activation, by the propagation of placements."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dp_partition.plan.placements import NodeType, PlacementSpec
from dp_partition.sharding.propagate import StoragePlacements, propagate
from dp_partition.sharding.rule_table import OutputPlacement

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
            inputs = {one: self.batch_dim_map.get(one, NO_BATCH) for one in node.graph.nodes if one.op == "placeholder"}
            types = {one: NodeType.PARAM if dim == NO_BATCH else NodeType.ACT for one, dim in inputs.items()}
            homes = StoragePlacements({one: _placement(dim) for one, dim in inputs.items()}, types)
            for one, plan in propagate(node.graph, homes, 1, local=False).items():  # one rank: no size matters
                self.batch_dim_map.setdefault(one, _dim_of(plan.output))  # dims set by the caller stay
        return self.batch_dim_map[node]

    def compute_act_spec(self, node: fx.Node, mesh: DeviceMesh) -> PlacementSpec:
        """Return an activation's placement: sharded on its batch dim, partial after its reduction, or full."""
        return PlacementSpec(mesh, (_placement(self.compute_batch_dim(node)),))


def _placement(dim: int) -> Placement:
    return {NO_BATCH: Replicate(), REDUCED: Partial("sum")}.get(dim, Shard(dim))


def _dim_of(output: OutputPlacement) -> int:
    if isinstance(output, tuple):
        return next((dim for dim in map(_dim_of, output) if dim != NO_BATCH), NO_BATCH)
    if isinstance(output, Shard):
        return output.dim
    return REDUCED if isinstance(output, Partial) else NO_BATCH
