"""Insert collectives: turn the single-device graph into the graph of one rank.

`Inserter` moves each input to its planned placement, and adapts arguments with shapes. Every value is moved at
most once to each placement. After a write only the written copy is valid: views of another copy are
taken again, and if an input of the graph was written in a gathered copy, the rank's shard is copied back.

`Mover` builds each move for one rank, from functional collectives: slices of uneven shards differ between ranks, the
sequence of collectives does not. Shards follow ``torch.chunk``: equal chunks of ``ceil(n / world)``, the last ones
smaller or empty. Uneven tensors are padded to ``world`` equal chunks for communication; the padding is the tail of the
result and is removed. Local values come from a run of the rank's graph on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.fx import GraphModule

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensorMode, collectives, pytree
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.nodes import aten, base_of, copy_notes, is_random, meta_of, mutated_inputs, root_of, tensors_of
from dp_partition.passes.save_memory import OWN_ROWS, SHARE_ROWS
from dp_partition.plan.placements import NodeType, RankLocal, chunk_bounds, local_shape
from dp_partition.sharding.propagate import NodePlan, gradient_name, is_gradient
from dp_partition.sharding.rule_table import HALF, OutputPlacement

# Position of the argument with the output's shape.
SHAPE_ARGUMENTS: dict[Any, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}

# Position of the argument with the number of rows (dim 0) of the input.
ROW_ARGUMENTS: dict[Any, int] = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}

LOWERED = (OWN_ROWS, SHARE_ROWS)
NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)


@dataclass(frozen=True)
class ViewOrigin:
    """Origin of a view: its base, that one's placement and node in the rank's graph."""

    base: fx.Node
    placement: Placement | None
    start: fx.Node


class Inserter:
    """One pass over a graph, for one rank."""

    def __init__(self, module: GraphModule, plans: dict[fx.Node, NodePlan], mover: Mover) -> None:
        self.module, self.plans, self.mover = module, plans, mover
        self.versions: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.stored: dict[fx.Node, tuple[Placement, fx.Node]] = {}  # of tensors that outlive the step
        self.views: dict[fx.Node, ViewOrigin] = {}
        self.native: dict[fx.Node, Placement] = {}
        self.roots: dict[fx.Node, fx.Node] = {}  # of views, as in the graph before all moves
        self.family: dict[fx.Node, list[fx.Node]] = {}
        self.moves: list[Move] = []
        self.gathered: dict[fx.Node, str] = {}  # phase of a source's last move
        # Gradients without a reader so far. Of several to one parameter each is incomplete until they are summed.
        nodes = [(node, meta_of(node)) for node in module.graph.nodes]
        gradients = {node: str(meta["mean_gradient"]) for node, meta in nodes if "mean_gradient" in meta}
        gradients = gradients or {node: gradient_name(node) for node, _ in nodes if is_gradient(node)}
        counts = Counter(gradients.values())
        self.unread = {node: name for node, name in gradients.items() if name and counts[name] == 1}

    def run(self) -> None:
        """Rewrite the full graph."""
        for node in list(self.module.graph.nodes):
            if node in self.plans:
                self.rewrite(node, self.plans[node])

    def rewrite(self, node: fx.Node, plan: NodePlan) -> None:
        """Move a node's inputs to their placements, and record its output's."""
        wanted = {source: plan.inputs.get(source) for source in node.all_input_nodes}
        written, base = mutated_inputs(node), base_of(node)
        # The first reader of an averaged gradient is marked, by argument position: passes replace the argument itself.
        rows = []
        for source, placement in wanted.items():
            if source in self.unread and isinstance(placement, Replicate | Shard):
                place = pytree.tree_leaves((node.args, node.kwargs)).index(source)
                rows.append((place, self.unread.pop(source), placement))
        if rows:
            meta_of(node)["reads"] = rows
        moved: dict[fx.Node, fx.Node] = {}
        for source, placement in wanted.items():
            if placement is not None and source in self.versions:
                version = self.version(source, placement, node)
                if version is not source:
                    moved[source] = version
        for source in written:
            self.unread.pop(self.roots.get(source, source), None)
            placement = wanted.get(source)
            if placement is not None:
                self.keep_written(node, source, placement)
        node.args = fx.map_arg(node.args, lambda n: moved.get(n, n))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: moved.get(n, n))
        if node.target in LOWERED:
            self.lower_rows(node)
            return
        if is_norm_in_half(node, plan.output) and node.target in NORMS:
            node.update_kwarg("dtype", torch.float32)
        if is_random(node):
            self.agree(node, plan)
        if base is not None:
            self.roots[node] = self.roots.get(base, base)
        if base is None and node.op == "call_function" and "gather_again" in meta_of(node):
            base = node.all_input_nodes[0]  # a cast: it is taken again as a view is
        if base is not None:
            self.views[node] = ViewOrigin(base, wanted.get(base), moved.get(base, base))
            self.gathered[node] = str(meta_of(node).get("phase"))
        if isinstance(plan.output, Placement):
            placement = plan.output
            self.versions[node] = {placement: node}
            self.native[node] = placement
            self.family.setdefault(self.roots.get(node, node), []).append(node)
            if node.op == "placeholder":
                self.stored[node] = placement, node
            position = SHAPE_ARGUMENTS.get(node.target)  # the output's global shape, in an argument
            if position is not None and isinstance(placement, Shard):
                shape = local_shape(tuple(node.meta["val"].shape), placement, self.mover.world, self.mover.rank)
                node.update_arg(position, list(shape))
        elif node.target in ROW_ARGUMENTS and pytree.tree_leaves(plan.output)[0] == Shard(0):
            position = ROW_ARGUMENTS[node.target]
            node.update_arg(position, node.args[position] // self.mover.world)  # type: ignore[operator]

    def lower_rows(self, node: fx.Node) -> None:
        """Lower ZeRO's markers: the rank's rows as a view, and all rows copied back."""
        param = node.args[0]
        assert isinstance(param, fx.Node)
        shape = tuple(param.meta["val"].shape)
        with self.module.graph.inserting_before(node):
            if node.target is OWN_ROWS:
                rows = self.mover.cut(param, 0, shape)
                rows.meta.update(node.meta)
                self.versions[node] = {Shard(0): rows}
                self.stored[node] = Shard(0), rows
                self.family[node] = [node]
                return
            rows = node.args[1]  # type: ignore[assignment]
            full = self.mover.all_gather(rows, 0, shape)
            copy = self.mover.call(aten.copy_.default, param, full)
        self.describe(rows, full, param, node)
        copy_notes(node, copy, "node_type")
        meta_of(copy)["phase"] = "optimizer"
        self.moves.append(Move(rows, full, Shard(0), Replicate(), shape, NodeType.PARAM, copy, param.meta["val"]))
        self.module.graph.erase_node(node)

    def agree(self, node: fx.Node, plan: NodePlan) -> None:
        """Share rank 0's random numbers if they have to be the same on every rank.

        Raises:
            PlanError: The operator returns several tensors.
        """
        if self.mover.world == 1 or Replicate() not in pytree.tree_leaves(plan.output):
            return
        if not isinstance(plan.output, Placement):
            raise PlanError(
                Problem(
                    "random-replay",
                    f"node {node.name} ({node.target})",
                    found="draws numbers that all ranks share, and returns several tensors",
                    hint="draw the numbers with torch.rand_like or dropout of a tensor that carries the batch",
                )
            )
        with self.module.graph.inserting_after(node):
            shared = self.mover.call(aten.copy_.default, node, node)  # the source is set below
        with self.module.graph.inserting_before(shared):
            mine = node if self.mover.rank == 0 else self.mover.call(aten.zeros_like.default, node)  # sum: rank 0's
            shared.update_arg(1, self.mover.all_reduce(mine, Partial("sum")))
        meta_of(shared)["agrees"] = True
        copy_notes(node, shared, "node_type", "phase", "val")

    def version(self, source: fx.Node, wanted: Placement, before: fx.Node) -> fx.Node:
        """Return the node with ``source`` at the wanted placement, moved if needed."""
        if not self.versions[source]:
            self.versions[source] = {self.native[source]: self.repeat_view(source, before)}
        versions = self.versions[source]
        phase = meta_of(before).get("phase")
        again = "gather_again" in meta_of(source) and wanted == Replicate() and phase == "backward"
        again = again and self.gathered.get(source) == "forward"
        if wanted in versions and not again:
            return versions[wanted]
        if again:
            versions.pop(Replicate(), None)  # forward's copy must not live on
        if again and source in self.views and self.native[source] == wanted:  # of a gathered base; else it moves below
            self.gathered[source] = "backward"
            versions[wanted] = self.repeat_view(source, before)
            return versions[wanted]
        # A full value is preferred, then a shard; an unreduced value comes last.
        is_last = [0 if isinstance(item, Replicate) else 2 if isinstance(item, Partial) else 1 for item in versions]
        origin = list(versions)[is_last.index(min(is_last))]
        if isinstance(origin, RankLocal) or isinstance(wanted, RankLocal):
            return versions[origin]  # each rank's own values: nothing to move
        if isinstance(origin, Partial) and isinstance(wanted, Shard) and self.plans[source].reduce_whole:
            versions[Replicate()] = self.version(source, Replicate(), before)
            origin = Replicate()
        shape = tuple(source.meta["val"].shape)
        with self.module.graph.inserting_before(before):
            start = versions[origin]
            result = self.mover.move(start, origin, wanted, shape)
            if is_norm_in_half(source, origin):
                result = self.mover.call(aten._to_copy.default, result, dtype=source.meta["val"].dtype)
        self.describe(start, result, source, before)
        kind, like = meta_of(source).get("node_type"), source.meta["val"]
        self.moves.append(Move(start, result, origin, wanted, shape, kind, before, like))
        versions[wanted] = result
        self.gathered[source] = str(phase)
        return result

    def describe(self, start: fx.Node, result: fx.Node, source: fx.Node, before: fx.Node) -> None:
        """Give inserted nodes the type of the moved value, and the phase of its user."""
        node = result
        while node is not start:
            copy_notes(source, node, "node_type")
            copy_notes(before, node, "phase")
            node = node.all_input_nodes[0]

    def keep_written(self, node: fx.Node, source: fx.Node, placement: Placement) -> None:
        """After a write keep only copies in the written memory. Of a written shard keep no full copy.

        Raises:
            PlanError: ``shared-memory`` for a value with later uses, but without a copy in the written memory.
        """
        memory = root_of(self.version(source, placement, node))
        root = self.roots.get(source, source)
        for relative in self.family.get(root, ()):
            versions = {
                lies: item
                for lies, item in self.versions[relative].items()
                if root_of(item) is memory and (isinstance(lies, Shard) or not isinstance(placement, Shard))
            }
            if relative in self.stored and root_of(self.stored[relative][1]) is not memory:
                # The rank's shard of the written full copy is copied back to the tensor.
                (lies, shard), full = self.stored[relative], versions.get(Replicate())
                if not isinstance(lies, Shard) or full is None:
                    raise self.lost(node, relative)
                with self.module.graph.inserting_before(node.next):
                    part = self.mover.cut(full, lies.dim, tuple(relative.meta["val"].shape))
                    copy = self.mover.call(aten.copy_.default, shard, part)
                for item in (part, copy):
                    copy_notes(relative, item, "node_type")
                    copy_notes(node, item, "phase")
                versions = {lies: shard, Replicate(): full}
            elif not versions and relative not in self.views and any(node < user for user in relative.users):
                raise self.lost(node, relative)
            self.versions[relative] = versions

    def lost(self, node: fx.Node, source: fx.Node) -> PlanError:
        return PlanError(
            Problem(
                "shared-memory",
                f"node {node.name} ({node.target})",
                found=f"writes to a redistributed copy of {source.name}, and later operators read {source.name} itself",
            )
        )

    def repeat_view(self, view: fx.Node, before: fx.Node) -> fx.Node:
        """Take a view of its base again. It was a view of another copy than the written one."""
        if view not in self.views:
            raise self.lost(before, view)
        origin = self.views[view]
        if origin.base not in self.versions:  # several views at once
            fresh = self.repeat_view(origin.base, before)
        elif isinstance(origin.placement, Partial) and origin.placement not in self.versions[origin.base]:
            raise self.lost(before, view)
        else:
            assert origin.placement is not None
            fresh = self.version(origin.base, origin.placement, before)
        with self.module.graph.inserting_before(before):
            again = self.module.graph.node_copy(view, lambda n: fresh if n is origin.start else n)
        copy_notes(before, again, "phase")
        return again


def is_norm_in_half(node: fx.Node, placement: OutputPlacement) -> bool:
    """Return True for norms of shards in half precision: they are computed in float32, and rounded once reduced."""
    kinds = placement if isinstance(placement, tuple) else (placement,)
    is_norm = any(isinstance(kind, Partial) and kind.reduce_op.startswith("norm") for kind in kinds)
    return is_norm and any(x.dtype in HALF for x in tensors_of(node))


def erase_tags(graph: fx.Graph) -> None:
    """Replace markers by the marked values: gradients keep a note of their parameter."""
    for node in list(graph.nodes):
        if node.target is TAG_GRAD or node.target is OWN_ROWS:
            if node.target is TAG_GRAD:
                meta_of(node.all_input_nodes[0])["gradient"] = gradient_name(node)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


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
    """Inserts moves on one mesh axis; gradients are averaged over a second one as well."""

    graph: fx.Graph  # the graph; nodes are inserted at its current insertion point
    world: int  # size of the group
    rank: int  # this graph's rank in the group
    group: str  # name of the process group
    replica_group: str = ""  # that of this rank's counterparts in other replicas; empty on a mesh of one axis
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
        work = self.issue(collectives.all_reduce.default, node, "avg", self.replica_group, ranks=self.replicas)
        return self.wait(work)

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
        if missing := step - (end - start):
            front = self.call(aten.constant_pad_nd.default, front, [0, 0] * (len(shape) - 1) + [0, missing])
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
            raise PlanError(
                Problem(
                    "shape-mismatch",
                    f"node {n.name} ({n.target})",
                    found=text,
                    hint="this is a defect of dp-partition's rule for the operator",
                )
            ) from error
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
