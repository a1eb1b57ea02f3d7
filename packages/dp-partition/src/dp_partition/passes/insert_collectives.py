"""Insert collectives: turn the single-device graph into the graph of one rank.

Brings each input where its node's plan wants it, and adapts the arguments that name shapes. Every value is moved at
most once to each placement. A value that is written keeps only the copy that was written: views of another copy are
taken anew, and where an input of the graph was written in a gathered copy, the rank's part is copied back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.fx import GraphModule

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.node_meta import copy_notes, meta_of
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.ops import aten, base_of, is_random, mutated_inputs, root_of
from dp_partition.passes.moves import Move, Mover
from dp_partition.passes.zero import OWN_ROWS, SHARE_ROWS
from dp_partition.plan.placements import NodeType, RankLocal, local_shape
from dp_partition.sharding.propagate import NodePlan, gradient_name, is_gradient

# Which argument of an operator names the output's shape.
SHAPE_ARGUMENTS: dict[Any, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}

# Which argument names the number of rows (dim 0) of the input.
ROW_ARGUMENTS: dict[Any, int] = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}

LOWERED = (OWN_ROWS, SHARE_ROWS)


@dataclass(frozen=True)
class Taken:
    """Origin of a view: the node it looks at, where that lay, and the node of the rank's graph."""

    base: fx.Node
    placement: Placement | None
    start: fx.Node


class Inserter:
    """One pass over a graph, for one rank."""

    def __init__(self, module: GraphModule, plans: dict[fx.Node, NodePlan], mover: Mover) -> None:
        self.module, self.plans, self.world, self.rank = module, plans, mover.world, mover.rank
        self.mover = mover
        self.versions: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.homes: dict[fx.Node, tuple[Placement, fx.Node]] = {}  # of what outlives the step
        self.taken: dict[fx.Node, Taken] = {}
        self.native: dict[fx.Node, Placement] = {}
        self.roots: dict[fx.Node, fx.Node] = {}  # of views, as in the graph before anything was moved
        self.family: dict[fx.Node, list[fx.Node]] = {}
        self.moves: list[Move] = []
        self.gathered: dict[fx.Node, str] = {}  # in which phase a source was moved last
        self.unread = single_gradients(module.graph)

    def run(self) -> None:
        """Rewrite the full graph."""
        for node in list(self.module.graph.nodes):
            if node in self.plans:
                self.rewrite(node, self.plans[node])

    def rewrite(self, node: fx.Node, plan: NodePlan) -> None:
        """Bring a node's inputs where it wants them and remember where its output lies."""
        wanted = {source: plan.inputs.get(source) for source in node.all_input_nodes}
        written, base = mutated_inputs(node), base_of(node)
        self.note_gradients(node, wanted)
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
        if is_random(node):
            self.agree(node, plan)
        if base is not None:
            self.roots[node] = self.roots.get(base, base)
            self.taken[node] = Taken(base, wanted.get(base), moved.get(base, base))
        if isinstance(plan.output, Placement):
            placement = plan.output
            self.versions[node] = {placement: node}
            self.native[node] = placement
            self.family.setdefault(self.roots.get(node, node), []).append(node)
            if node.op == "placeholder":
                self.homes[node] = placement, node
            self.fit_shape(node, placement)
        elif node.target in ROW_ARGUMENTS and pytree.tree_leaves(plan.output)[0] == Shard(0):
            position = ROW_ARGUMENTS[node.target]
            node.update_arg(position, node.args[position] // self.world)  # type: ignore[operator]

    def note_gradients(self, node: fx.Node, wanted: dict[fx.Node, Placement | None]) -> None:
        """Mark the first node that reads an averaged gradient: passes change what it reads, and not where."""
        rows = []
        for source, placement in wanted.items():
            if source in self.unread and isinstance(placement, Replicate | Shard):
                place = pytree.tree_leaves((node.args, node.kwargs)).index(source)
                rows.append((place, self.unread.pop(source), placement))
        if rows:
            meta_of(node)["reads"] = rows

    def lower_rows(self, node: fx.Node) -> None:
        """ZeRO's markers: the rank's rows as a view of the parameter, and all rows copied back into it."""
        param = node.args[0]
        assert isinstance(param, fx.Node)
        shape = tuple(param.meta["val"].shape)
        with self.module.graph.inserting_before(node):
            if node.target is OWN_ROWS:
                rows = self.mover.cut(param, 0, shape)
                rows.meta.update(node.meta)
                self.versions[node] = {Shard(0): rows}
                self.homes[node] = Shard(0), rows
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
        """Random numbers that are to be the same on every rank: rank 0's count.

        Raises:
            PlanError: For an operator that returns several tensors.
        """
        if self.world == 1 or Replicate() not in pytree.tree_leaves(plan.output):
            return
        if not isinstance(plan.output, Placement):
            hint = "draw the numbers with torch.rand_like or dropout of a tensor that carries the batch"
            found = "draws numbers that all ranks share, and returns several tensors"
            raise PlanError(Problem("random-replay", f"node {node.name} ({node.target})", found=found, hint=hint))
        with self.module.graph.inserting_after(node):
            shared = self.mover.call(aten.copy_.default, node, node)  # its source is put in below
        with self.module.graph.inserting_before(shared):
            mine = node if self.rank == 0 else self.mover.call(aten.zeros_like.default, node)
            shared.update_arg(1, self.mover.all_reduce(mine, Partial("sum")))
        meta_of(shared)["agrees"] = True
        copy_notes(node, shared, "node_type", "phase", "val")

    def version(self, source: fx.Node, wanted: Placement, before: fx.Node) -> fx.Node:
        """The node that holds ``source`` where it is wanted, moved there if need be."""
        if not self.versions[source]:
            self.versions[source] = {self.native[source]: self.take_again(source, before)}
        known = self.versions[source]
        phase = meta_of(before).get("phase")
        again = "gather_again" in meta_of(source) and wanted == Replicate() and phase == "backward"
        if wanted in known and not (again and self.gathered.get(source) == "forward"):
            return known[wanted]
        if again:
            known.pop(Replicate(), None)
        origin = _best_origin(known, wanted)
        if isinstance(origin, RankLocal) or isinstance(wanted, RankLocal):
            return known[origin]
        if isinstance(origin, Partial) and isinstance(wanted, Shard) and self.plans[source].reduce_whole:
            known[Replicate()] = self.version(source, Replicate(), before)
            origin = Replicate()
        shape = tuple(source.meta["val"].shape)
        with self.module.graph.inserting_before(before):
            start = known[origin]
            result = self.mover.move(start, origin, wanted, shape)
        self.describe(start, result, source, before)
        kind, like = meta_of(source).get("node_type"), source.meta["val"]
        self.moves.append(Move(start, result, origin, wanted, shape, kind, before, like))
        known[wanted] = result
        self.gathered[source] = str(phase)
        return result

    def describe(self, start: fx.Node, result: fx.Node, source: fx.Node, before: fx.Node) -> None:
        """Let inserted nodes carry the type of what they move, and the phase that needs it."""
        node = result
        while node is not start:
            copy_notes(source, node, "node_type")
            copy_notes(before, node, "phase")
            node = node.all_input_nodes[0]

    def keep_written(self, node: fx.Node, source: fx.Node, placement: Placement) -> None:
        """After a write only what shares the written memory is the tensor; of a shard that is written, no full copy.

        Raises:
            PlanError: ``shared-memory`` for a value that is used later, and whose written copy cannot stand for it.
        """
        memory = root_of(self.version(source, placement, node))
        root = self.roots.get(source, source)
        for relative in self.family.get(root, ()):
            known = {
                lies: one
                for lies, one in self.versions[relative].items()
                if root_of(one) is memory and (isinstance(lies, Shard) or not isinstance(placement, Shard))
            }
            if relative in self.homes and root_of(self.homes[relative][1]) is not memory:
                known = self.write_back(node, relative, known)
            elif not known and relative not in self.taken and any(node < user for user in relative.users):
                raise self.lost(node, relative)
            self.versions[relative] = known

    def write_back(self, node: fx.Node, source: fx.Node, known: dict[Placement, fx.Node]) -> dict[Placement, fx.Node]:
        """The rank's part of a full copy that was written goes to where the tensor lies."""
        (placement, home), full = self.homes[source], known.get(Replicate())
        if not isinstance(placement, Shard) or full is None:
            raise self.lost(node, source)
        with self.module.graph.inserting_before(node.next):
            part = self.mover.cut(full, placement.dim, tuple(source.meta["val"].shape))
            copy = self.mover.call(aten.copy_.default, home, part)
        for one in (part, copy):
            copy_notes(source, one, "node_type")
            copy_notes(node, one, "phase")
        return {placement: home, Replicate(): full}

    def lost(self, node: fx.Node, source: fx.Node) -> PlanError:
        found = f"writes a copy of {source.name}, which is used later where it was"
        return PlanError(Problem("shared-memory", f"node {node.name} ({node.target})", found=found))

    def take_again(self, view: fx.Node, before: fx.Node) -> fx.Node:
        """A view of what its base is now: the copy that it looked at was not the one that was written."""
        if view not in self.taken:
            raise self.lost(before, view)
        taken = self.taken[view]
        if taken.base not in self.versions:  # several views at once
            fresh = self.take_again(taken.base, before)
        elif isinstance(taken.placement, Partial) and taken.placement not in self.versions[taken.base]:
            raise self.lost(before, view)
        else:
            assert taken.placement is not None
            fresh = self.version(taken.base, taken.placement, before)
        with self.module.graph.inserting_before(before):
            again = self.module.graph.node_copy(view, lambda n: fresh if n is taken.start else n)
        copy_notes(before, again, "phase")
        return again

    def fit_shape(self, node: fx.Node, placement: Placement) -> None:
        """Let an argument that names the output's shape name the local one."""
        position = SHAPE_ARGUMENTS.get(node.target)
        if position is not None and isinstance(placement, Shard):
            shape = local_shape(tuple(node.meta["val"].shape), placement, self.world, self.rank)
            node.update_arg(position, list(shape))


def _best_origin(known: dict[Placement, fx.Node], wanted: Placement) -> Placement:
    """Prefer what is full, then a shard; an unreduced value comes last."""

    def rank(placement: Placement) -> int:
        if isinstance(placement, Replicate):
            return 0
        return 2 if isinstance(placement, Partial) else 1

    return min(known, key=rank)


def single_gradients(graph: fx.Graph) -> dict[fx.Node, str]:
    """Gradients by node, of parameters that have one in the step: several are summed before they are complete."""
    means = {node: str(meta_of(node)["mean_gradient"]) for node in graph.nodes if "mean_gradient" in meta_of(node)}
    found = means or {node: gradient_name(node) for node in graph.nodes if is_gradient(node)}
    counts = Counter(found.values())
    return {node: name for node, name in found.items() if name and counts[name] == 1}


def erase_tags(graph: fx.Graph) -> None:
    """Drop gradient tags: the tagged value takes their place, and remembers whose gradient it is."""
    for node in list(graph.nodes):
        if node.target is TAG_GRAD or node.target is OWN_ROWS:
            if node.target is TAG_GRAD and len(node.args) > 1:
                meta_of(node.all_input_nodes[0]).setdefault("gradient", node.args[1])
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
