"""Insert collectives: turn the single-device graph into the graph of one rank.

Moves each input to its planned placement, and adapts arguments with shapes. Every value is moved at
most once to each placement. After a write only the written copy is valid: views of another copy are
taken again, and if an input of the graph was written in a gathered copy, the rank's shard is copied back.
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
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.nodes import aten, base_of, copy_notes, is_random, meta_of, mutated_inputs, root_of
from dp_partition.passes.moves import Move, Mover
from dp_partition.passes.save_memory import OWN_ROWS, SHARE_ROWS
from dp_partition.plan.placements import NodeType, RankLocal, local_shape
from dp_partition.sharding.propagate import NodePlan, gradient_name, is_gradient

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


@dataclass(frozen=True)
class Taken:
    """Origin of a view: its base, that one's placement and node in the rank's graph."""

    base: fx.Node
    placement: Placement | None
    start: fx.Node


class Inserter:
    """One pass over a graph, for one rank."""

    def __init__(self, module: GraphModule, plans: dict[fx.Node, NodePlan], mover: Mover) -> None:
        self.module, self.plans, self.world, self.rank = module, plans, mover.world, mover.rank
        self.mover = mover
        self.versions: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.homes: dict[fx.Node, tuple[Placement, fx.Node]] = {}  # of tensors that outlive the step
        self.taken: dict[fx.Node, Taken] = {}
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
        if is_random(node):
            self.agree(node, plan)
        if base is not None:
            self.roots[node] = self.roots.get(base, base)
        if base is None and node.op == "call_function" and "gather_again" in meta_of(node):
            base = node.all_input_nodes[0]  # a cast: it is taken again as a view is
        if base is not None:
            self.taken[node] = Taken(base, wanted.get(base), moved.get(base, base))
            self.gathered[node] = str(meta_of(node).get("phase"))
        if isinstance(plan.output, Placement):
            placement = plan.output
            self.versions[node] = {placement: node}
            self.native[node] = placement
            self.family.setdefault(self.roots.get(node, node), []).append(node)
            if node.op == "placeholder":
                self.homes[node] = placement, node
            position = SHAPE_ARGUMENTS.get(node.target)  # the output's global shape, in an argument
            if position is not None and isinstance(placement, Shard):
                shape = local_shape(tuple(node.meta["val"].shape), placement, self.world, self.rank)
                node.update_arg(position, list(shape))
        elif node.target in ROW_ARGUMENTS and pytree.tree_leaves(plan.output)[0] == Shard(0):
            position = ROW_ARGUMENTS[node.target]
            node.update_arg(position, node.args[position] // self.world)  # type: ignore[operator]

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
        """Share rank 0's random numbers if they have to be the same on every rank.

        Raises:
            PlanError: The operator returns several tensors.
        """
        if self.world == 1 or Replicate() not in pytree.tree_leaves(plan.output):
            return
        if not isinstance(plan.output, Placement):
            hint = "draw the numbers with torch.rand_like or dropout of a tensor that carries the batch"
            reason = "draws numbers that all ranks share, and returns several tensors"
            raise PlanError(Problem("random-replay", f"node {node.name} ({node.target})", found=reason, hint=hint))
        with self.module.graph.inserting_after(node):
            shared = self.mover.call(aten.copy_.default, node, node)  # the source is set below
        with self.module.graph.inserting_before(shared):
            mine = node if self.rank == 0 else self.mover.call(aten.zeros_like.default, node)  # sum: rank 0's
            shared.update_arg(1, self.mover.all_reduce(mine, Partial("sum")))
        meta_of(shared)["agrees"] = True
        copy_notes(node, shared, "node_type", "phase", "val")

    def version(self, source: fx.Node, wanted: Placement, before: fx.Node) -> fx.Node:
        """Return the node with ``source`` at the wanted placement, moved if needed."""
        if not self.versions[source]:
            self.versions[source] = {self.native[source]: self.take_again(source, before)}
        versions = self.versions[source]
        phase = meta_of(before).get("phase")
        again = "gather_again" in meta_of(source) and wanted == Replicate() and phase == "backward"
        again = again and self.gathered.get(source) == "forward"
        if wanted in versions and not again:
            return versions[wanted]
        if again:
            versions.pop(Replicate(), None)  # forward's copy must not live on
        if again and source in self.taken and self.native[source] == wanted:  # of a gathered base; else it moves below
            self.gathered[source] = "backward"
            versions[wanted] = self.take_again(source, before)
            return versions[wanted]
        # A full value is preferred, then a shard; an unreduced value comes last.
        is_last = [0 if isinstance(one, Replicate) else 2 if isinstance(one, Partial) else 1 for one in versions]
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
                lies: one
                for lies, one in self.versions[relative].items()
                if root_of(one) is memory and (isinstance(lies, Shard) or not isinstance(placement, Shard))
            }
            if relative in self.homes and root_of(self.homes[relative][1]) is not memory:
                # The rank's shard of the written full copy is copied back to the tensor.
                (lies, home), full = self.homes[relative], versions.get(Replicate())
                if not isinstance(lies, Shard) or full is None:
                    raise self.lost(node, relative)
                with self.module.graph.inserting_before(node.next):
                    part = self.mover.cut(full, lies.dim, tuple(relative.meta["val"].shape))
                    copy = self.mover.call(aten.copy_.default, home, part)
                for one in (part, copy):
                    copy_notes(relative, one, "node_type")
                    copy_notes(node, one, "phase")
                versions = {lies: home, Replicate(): full}
            elif not versions and relative not in self.taken and any(node < user for user in relative.users):
                raise self.lost(node, relative)
            self.versions[relative] = versions

    def lost(self, node: fx.Node, source: fx.Node) -> PlanError:
        reason = f"writes to a redistributed copy of {source.name}, and later operators read {source.name} itself"
        return PlanError(Problem("shared-memory", f"node {node.name} ({node.target})", found=reason))

    def take_again(self, view: fx.Node, before: fx.Node) -> fx.Node:
        """Take a view of its base again. It was a view of another copy than the written one."""
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


def erase_tags(graph: fx.Graph) -> None:
    """Replace gradient tags by the tagged values, with a note of the parameter."""
    for node in list(graph.nodes):
        if node.target is TAG_GRAD or node.target is OWN_ROWS:
            if node.target is TAG_GRAD and len(node.args) > 1:
                meta_of(node.all_input_nodes[0]).setdefault("gradient", node.args[1])
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
