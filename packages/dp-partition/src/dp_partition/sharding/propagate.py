"""Propagate: decide the placement of every node's value, and of its inputs.

One walk through the graph. For each call the rule table lists the ways to run it on shards, and the cheapest is
taken; a call without a rule runs on replicated inputs, valid for every operator that is the same function on
every rank.

Two semantics meet here. Under *local* semantics everything that depends on the batch is `RankLocal`: each rank runs the
step as written on its own batch, nothing is moved, and a tagged gradient becomes a pending average over the ranks.
Under *global* semantics the batch is a shard of one big batch, and the rules keep every value equal to that of a
single device.

An unreduced gradient is reduced once, at its first use; later uses take the reduced value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.nodes import is_op, is_random, kind_of, meta_of, mutated_inputs, root_of, viewed_input
from dp_partition.plan.placements import NodeType, RankLocal, describe
from dp_partition.sharding.op_rules import find_rule
from dp_partition.sharding.rule_table import Call, Candidate, OutputPlacement, R, cheapest

AVG = Partial("avg")


@dataclass
class NodePlan:
    """Decision for one node."""

    output: OutputPlacement  # placement of its value
    inputs: dict[fx.Node, Placement] = field(default_factory=dict)  # required placement of each tensor input
    node_type: NodeType = NodeType.NON_TENSOR  # its role in the step
    reduce_whole: bool = False  # an unreduced gradient, wanted in full: it is all-reduced, also for users of a shard


@dataclass
class StoragePlacements:
    """Placements and types of the graph's inputs."""

    placements: dict[fx.Node, Placement]  # placement of every placeholder
    types: dict[fx.Node, NodeType]  # node type of every placeholder
    # wanted placement of a gradient, from its parameter's name and its shape
    gradient_placement: Callable[[str, tuple[int, ...]], Placement] = lambda name, shape: R
    keep_outputs: bool = False  # return sharded values as shards, instead of gathered


def propagate(graph: fx.Graph, storage: StoragePlacements, world: int, *, local: bool) -> dict[fx.Node, NodePlan]:
    """Plan every node of a canonical graph.

    Raises:
        PlanError: The step would make ranks diverge, or has an operator that cannot run on shards.
    """
    walk = _Walk(graph, storage, world, local)
    for position, node in enumerate(graph.nodes):
        walk.visit(position, node)
    if walk.problems:  # all of them in one error
        raise PlanError(walk.problems, "the step cannot be partitioned")
    return walk.plans


class _Walk:
    """One walk over the nodes of a graph, which places each and collects problems."""

    def __init__(self, graph: fx.Graph, storage: StoragePlacements, world: int, local: bool) -> None:
        self.storage, self.world, self.local = storage, world, local
        self.states: dict[fx.Node, OutputPlacement] = {}
        self.types: dict[fx.Node, NodeType | None] = {}
        self.desired: dict[fx.Node, Placement] = {}
        self.plans: dict[fx.Node, NodePlan] = {}
        self.problems: list[Problem] = []
        tags = [position for position, node in enumerate(graph.nodes) if is_gradient(node)]
        self.last_tag = max(tags, default=-1)  # gradients may stay partial until here
        self.from_gradient: dict[fx.Node, str] = {}  # node that depends on a gradient -> parameter of the gradient

    def visit(self, position: int, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.record(node, self.storage.placements.get(node, R), {}, self.storage.types.get(node))
        elif node.op == "get_attr":
            self.record(node, R, {}, None)
        elif node.op == "output":
            self.visit_output(node)
        elif not is_op(node):
            self.visit_python(node)
        elif is_own_rows(node):
            self.record(node, Shard(0), dict.fromkeys(self.tensor_inputs(node), R), NodeType.PARAM)
        elif str(node.target).startswith("dp_partition.share_rows"):
            param, rows = node.all_input_nodes
            self.record(node, None, {param: R, rows: Shard(0)}, NodeType.PARAM)
        elif self.local and (
            is_random(node) or any(isinstance(self.states[n], RankLocal) for n in self.tensor_inputs(node))
        ):
            self.visit_per_rank(node)
        else:
            self.visit_call(position, node)
        if is_gradient(node):
            self.tag(node)
        elif self.local and node.op == "call_function":
            for source in node.all_input_nodes:
                if source in self.from_gradient:
                    self.from_gradient[node] = self.from_gradient[source]

    def tensor_inputs(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.states.get(n) is not None]

    def record(
        self, node: fx.Node, output: OutputPlacement, inputs: dict[fx.Node, Placement], kind: NodeType | None
    ) -> None:
        self.states[node], self.types[node] = output, kind
        self.plans[node] = NodePlan(output, inputs, kind if kind is not None else NodeType.NON_TENSOR)

    def spread(self, node: fx.Node, placement: Placement) -> OutputPlacement:
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            return tuple(placement for _ in value)
        return None if value is None and mutated_inputs(node) else placement

    def join_types(self, nodes: list[fx.Node]) -> NodeType | None:
        present = [self.types.get(node) for node in nodes]
        for kind in (NodeType.ACT, NodeType.STATE, NodeType.PARAM, NodeType.GRAD):
            if kind in present:
                return kind
        return None

    def tag(self, node: fx.Node) -> None:
        """Mark a gradient: under local semantics it stands for the average over ranks."""
        self.desired[node] = self.storage.gradient_placement(gradient_name(node), _shape(node))
        self.plans[node].reduce_whole = self.desired[node] == R
        self.types[node] = self.plans[node].node_type = NodeType.GRAD
        if isinstance(self.states[node], RankLocal):
            self.states[node] = self.plans[node].output = AVG  # not reduced yet
        if not self.local:
            return
        # The gradient of a loss with a gradient in it: the rank's own was meant, not the average.
        earlier = {self.from_gradient[source] for source in node.all_input_nodes if source in self.from_gradient}
        if earlier:
            self.complain(
                "not-differentiable",
                node,
                f"is the gradient of {gradient_name(node)!r} through the gradient of {min(earlier)!r}",
                'use semantics="global", which takes every derivative of the loss over all rows',
            )
        self.from_gradient[node] = gradient_name(node)

    def visit_python(self, node: fx.Node) -> None:
        """Plan ``getitem`` of a list, or arithmetic on scalars."""
        source = node.args[0] if node.args else None
        state = self.states.get(source) if isinstance(source, fx.Node) else None
        if isinstance(state, tuple):
            assert isinstance(source, fx.Node)
            index = node.args[1]
            self.record(node, state[index], {}, self.types.get(source))  # type: ignore[index]
            if source in self.desired:
                self.desired[node] = self.desired[source]
            return
        states = [self.states.get(n) for n in node.all_input_nodes]
        joined: Placement = RankLocal() if any(isinstance(s, RankLocal) for s in states) else R
        self.record(node, joined, {}, self.join_types(node.all_input_nodes))

    def visit_per_rank(self, node: fx.Node) -> None:
        """Plan an activation under local semantics: each rank's own values, full parameters."""
        inputs: dict[fx.Node, Placement] = {}
        written = mutated_inputs(node)
        for source in self.tensor_inputs(node):
            state = self.states[source]
            if isinstance(state, Partial) and source not in self.from_gradient:
                self.states[source] = state = R  # the unreduced sum of a parameter's shards
            if isinstance(state, Partial):
                self.complain(
                    "gradient-meets-activation",
                    node,
                    f"uses the gradient {source.name} with a rank's own values",
                    "under local semantics gradients are averaged over the ranks before anything else uses them",
                )
            inputs[source] = RankLocal() if isinstance(state, RankLocal) else R
            if source in written and not isinstance(state, RankLocal):
                self.write_per_rank(node, source, inputs)
        self.record(node, self.spread(node, RankLocal()), inputs, NodeType.ACT)

    def write_per_rank(self, node: fx.Node, target: fx.Node, inputs: dict[fx.Node, Placement]) -> None:
        """Plan a write of a rank's own value into a tensor equal on all ranks."""
        root = root_of(target)
        if is_own_rows(root):  # a view of the parameter: its memory outlives the step
            root = root.all_input_nodes[0]
        if kind_of(root) == "buffer":  # each rank keeps its own
            self.states[target] = inputs[target] = RankLocal()
            self.states[root] = RankLocal()
        elif root.op == "placeholder" and self.storage.types.get(root) in (NodeType.PARAM, NodeType.STATE):
            self.complain(
                "ranks-diverge",
                node,
                f"writes a rank's own value into {root.name}, which all ranks share",
                "update parameters and optimizer state from gradients only",
            )
        else:
            self.states[target] = self.states[root] = RankLocal()
            inputs[target] = R

    def complain(self, code: str, node: fx.Node, found: str, hint: str = "") -> None:
        self.problems.append(Problem(code, f"node {node.name} ({node.target})", found=found, hint=hint))

    def visit_call(self, position: int, node: fx.Node) -> None:
        sources = self.tensor_inputs(node)
        # Parameters are gathered in full for activations, and before views of them: checked by `may_write`.
        meets_activation, viewed = NodeType.ACT in {self.types.get(n) for n in sources}, viewed_input(node)
        params = [n for n in sources if self.types.get(n) == NodeType.PARAM]
        self.param_gathers = {n for n in params if meets_activation or n is viewed}
        phase = meta_of(node).get("phase")
        early = position <= self.last_tag if phase is None else phase != "optimizer"
        is_update = phase == "optimizer" and not meets_activation
        call = Call(node, self.states, self.world, self.desired, early, is_update)
        rule = find_rule(node)
        candidates = list(rule(call)) if rule is not None else []
        candidates.append(Candidate(dict.fromkeys(sources, R), self.spread(node, R)))
        if is_random(node) and not any(isinstance(self.states[n], Shard) for n in sources):
            candidates = candidates[-1:]  # all ranks draw the same numbers
        best = cheapest(call, [c for c in candidates if self.may_write(node, c)])  # in place, if possible
        if best is None:  # write a gathered copy, and copy the shard back
            best = cheapest(call, [c for c in candidates if self.may_write(node, c, back=True)])
        if best is None:
            placements = ", ".join(f"{n.name}: {describe(self.states[n])}" for n in sources)
            self.complain(
                "no-sharding-strategy",
                node,
                f"inputs lie as {placements}",
                "no rule runs this operator on shards and writes its result back; replicate the tensors it writes",
            )
            best = Candidate({n: self.states[n] for n in sources}, self.spread(node, R))  # type: ignore[misc]
        inputs = {n: best.inputs.get(n, R) for n in sources}
        # Reduced values are reduced from here on, and written values at the placement of the write.
        written = mutated_inputs(node)
        for source, wanted in inputs.items():
            state = self.states[source]
            stays = source.op == "placeholder" and isinstance(state, Shard)  # a full write is copied back
            if (isinstance(state, Partial) and state != wanted) or (source in written and not stays):
                self.states[source] = wanted
        self.record(node, best.output, inputs, self.join_types(sources))
        # A function of an unreduced gradient is wanted where the gradient is.
        for source in sources if isinstance(self.states[node], Partial) else ():
            if source in self.desired and _shape(source) == _shape(node):
                self.desired[node] = self.desired[source]
                self.plans[node].reduce_whole |= self.plans[source].reduce_whole

    def may_write(self, node: fx.Node, candidate: Candidate, back: bool = False) -> bool:
        """Return True if writes keep placements: inputs of the graph, views with their base.

        Args:
            node: The writing call.
            candidate: Its placements.
            back: A sharded input of the graph may be written in full, and its shard copied back.
        """
        for source in mutated_inputs(node):
            wanted = candidate.inputs.get(source, R)
            root = root_of(source)
            full = back and source is root and wanted == R and isinstance(self.states[source], Shard)
            outlives = root.op in ("placeholder", "get_attr")  # a tensor of a closure too: every rank holds it full
            if outlives and wanted != self.states[source] and not full:
                return False
            reduced = isinstance(self.states[source], Partial)  # into memory of its own; `insert` checks later uses
            if root is not source and wanted != self.states[source] and not reduced:
                return False
        return all(candidate.inputs.get(n, R) == R for n in self.param_gathers if n not in mutated_inputs(node))

    def visit_output(self, node: fx.Node) -> None:
        """Replicate values for the user; new optimizer state keeps its parameter's placement."""
        inputs: dict[fx.Node, Placement] = {}
        for source in self.tensor_inputs(node):
            state = self.states[source]
            if isinstance(state, Partial):
                inputs[source] = self.desired.get(source, R)
            elif isinstance(state, Placement):
                keeps = self.storage.keep_outputs or self.types.get(source) in (NodeType.ACT, None)
                inputs[source] = state if keeps or isinstance(state, RankLocal) else R
        self.record(node, None, inputs, NodeType.NON_TENSOR)


def is_own_rows(node: fx.Node) -> bool:
    """Return True for the rows of a parameter that this rank updates (ZeRO-1 and ZeRO-2)."""
    return str(node.target).startswith("dp_partition.own_rows")


def is_gradient(node: fx.Node) -> bool:
    """Return True for a parameter's gradient: a tag, or the node of a removed tag."""
    return node.target is TAG_GRAD or "gradient" in meta_of(node)


def gradient_name(node: fx.Node) -> str:
    if node.target is TAG_GRAD:
        return str(node.args[1]) if len(node.args) > 1 else ""
    return str(meta_of(node)["gradient"])


def _shape(node: fx.Node) -> tuple[int, ...]:
    value: Any = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
