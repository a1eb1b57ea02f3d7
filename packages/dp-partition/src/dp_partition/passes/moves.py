"""A rank's own part of a graph: moves between placements as functional collectives, and its local shapes.

A mover builds for one rank: slices of uneven shards differ between ranks, the sequence of collectives does
not. Shards follow ``torch.chunk``: equal chunks of ``ceil(n / world)``, the last ones smaller or empty. Uneven
tensors are padded to ``world`` equal chunks for communication; the padding is the tail of the result and is removed.
Local values come from a run of the rank's graph on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensorMode, collectives
from dp_partition.nodes import aten, meta_of
from dp_partition.plan.placements import NodeType, chunk_bounds, local_shape

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # over dim 0, the ranks
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


@dataclass
class Move:
    """One move in a graph."""

    start: fx.Node
    result: fx.Node
    origin: Placement
    wanted: Placement
    shape: tuple[int, ...]
    node_type: NodeType | None
    before: fx.Node
    like: torch.Tensor


@dataclass
class Mover:
    """Inserts moves on one mesh axis; gradients are averaged over a second one as well.

    Attributes:
        graph: The graph; nodes are inserted at its current insertion point.
        world: Size of the group.
        rank: This graph's rank in the group.
        group: Name of the process group.
        replica_group: Name of the group of this rank's counterparts in other replicas, to average gradients
            over as well; empty on a mesh of one axis.
        replicas: Size of that group.
    """

    graph: fx.Graph
    world: int
    rank: int
    group: str
    replica_group: str = ""
    replicas: int = 1

    def move(self, node: fx.Node, source: Placement, target: Placement, shape: tuple[int, ...]) -> fx.Node:
        """Return a node with the value of ``node``, moved from one placement to another."""
        if isinstance(source, Partial):
            if isinstance(target, Shard):
                return self.reduce_scatter(node, source, target.dim, shape)
            return self.all_reduce(node, source)
        if isinstance(source, Shard):
            full = self.all_gather(node, source.dim, shape)
            return full if isinstance(target, Replicate) else self.move(full, Replicate(), target, shape)
        if isinstance(target, Shard):
            return self.cut(node, target.dim, shape)
        assert isinstance(target, Partial), f"no move from {source} to {target}"
        if target.reduce_op in ("max", "min", "avg") or self.rank == 0:  # a sum: zeros on other ranks
            return node
        return self.call(aten.zeros_like.default, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def issue(self, target: Any, *args: Any, ranks: int | None = None) -> fx.Node:
        """Insert a collective, with a note of its number of ranks."""
        node = self.call(target, *args)
        meta_of(node)["ranks"] = ranks or self.world
        return node

    def over_replicas(self, node: fx.Node, kind: Partial) -> fx.Node:
        """Average over the replicas as well, after this axis."""
        if not self.replica_group or kind.reduce_op != "avg":
            return node
        return self.wait(
            self.issue(collectives.all_reduce.default, node, "avg", self.replica_group, ranks=self.replicas)
        )

    def wait(self, node: fx.Node) -> fx.Node:
        return self.call(collectives.wait_tensor.default, node)

    def all_reduce(self, node: fx.Node, kind: Partial) -> fx.Node:
        """Partial -> replicated."""
        if kind.reduce_op.startswith("norm"):
            order = float(kind.reduce_op.removeprefix("norm"))
            powers = self.call(aten.pow.Tensor_Scalar, node, order)  # p-norms add as powers
            total = self.wait(self.issue(collectives.all_reduce.default, powers, "sum", self.group))
            return self.call(aten.pow.Tensor_Scalar, total, 1.0 / order)
        total = self.wait(self.issue(collectives.all_reduce.default, node, kind.reduce_op, self.group))
        return self.over_replicas(total, kind)

    def reduce_scatter(self, node: fx.Node, kind: Partial, dim: int, shape: tuple[int, ...]) -> fx.Node:
        """Partial -> shard."""
        front = self.call(aten.transpose.int, node, 0, dim) if dim else node
        padded = self.pad(front, shape[dim])  # equal chunks for all ranks
        target = collectives.reduce_scatter_tensor.default
        result = self.issue(target, padded, kind.reduce_op, self.world, self.group)  # along dim 0
        mine = self.unpad(self.over_replicas(self.wait(result), kind), shape[dim])
        return self.from_front(mine, dim)

    def pad(self, node: fx.Node, size: int) -> fx.Node:
        """Pad rows 0..size to ``world`` equal chunks, contiguous."""
        missing = -(-size // self.world) * self.world - size
        rows = node
        if missing:
            ndim = len(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else 1
            rows = self.call(aten.constant_pad_nd.default, node, [0, 0] * (ndim - 1) + [0, missing])
        return self.call(aten.contiguous.default, rows)

    def unpad(self, chunk: fx.Node, size: int) -> fx.Node:
        """Return the rank's chunk without padding."""
        start, end = chunk_bounds(size, self.world, self.rank)
        if end - start == -(-size // self.world):
            return chunk
        return self.call(aten.slice.Tensor, chunk, 0, 0, end - start)

    def all_gather(self, node: fx.Node, dim: int, shape: tuple[int, ...]) -> fx.Node:
        """Shard -> replicated."""
        size = shape[dim]
        step = -(-size // self.world)  # rows of a full chunk
        front = self.call(aten.transpose.int, node, 0, dim) if dim else node
        start, end = chunk_bounds(size, self.world, self.rank)
        if end - start != step:
            front = self.call(
                aten.constant_pad_nd.default, front, [0, 0] * (len(shape) - 1) + [0, step - (end - start)]
            )
        front = self.call(aten.contiguous.default, front)
        full = self.wait(self.issue(collectives.all_gather_into_tensor.default, front, self.world, self.group))
        if step * self.world != size:
            full = self.call(aten.slice.Tensor, full, 0, 0, size)
        return self.from_front(full, dim)

    def from_front(self, node: fx.Node, dim: int) -> fx.Node:
        """Move dim 0 back to its place, contiguous for views that the trace took."""
        if dim == 0:
            return node
        return self.call(aten.contiguous.default, self.call(aten.transpose.int, node, 0, dim))

    def cut(self, node: fx.Node, dim: int, shape: tuple[int, ...]) -> fx.Node:
        """Replicated -> shard: no communication, a view."""
        start, end = chunk_bounds(shape[dim], self.world, self.rank)
        return self.call(aten.slice.Tensor, node, dim, start, end)


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            hint = "this is a defect of dp-partition's rule for the operator"
            raise PlanError(Problem("shape-mismatch", f"node {n.name} ({n.target})", found=text, hint=hint)) from error
        n.meta["val"] = value
        n.meta.pop("tensor_meta", None)  # of the global value
        return value


def record_local_values(module: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> None:
    """Fill ``meta["val"]`` of every node from fake local inputs.

    Raises:
        PlanError: An operator does not accept its local inputs (code ``shape-mismatch``).
    """
    with mode, torch.no_grad():
        _Recorder(module, garbage_collect_values=True).run(*inputs)


def local_inputs(
    graph: fx.Graph, placements: list[Placement], mode: FakeTensorMode, world: int, rank: int
) -> list[Any]:
    """Return a fake local tensor for every placeholder, in order; other values unchanged."""
    fakes: list[Any] = []
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    with mode:
        for node, placement in zip(nodes, placements, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                fakes.append(0.5 if value is None else value)  # a hyperparameter: any float
                continue
            shape = local_shape(tuple(value.shape), placement, world, rank)
            stride = value.stride() if shape == tuple(value.shape) else torch.empty(shape, device="meta").stride()
            fakes.append(torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device))
    return fakes
