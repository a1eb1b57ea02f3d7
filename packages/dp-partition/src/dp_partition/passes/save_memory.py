"""Less memory on each rank: passes on the single-device graph, carried out by `insert_collectives`.

ZeRO-1 and ZeRO-2 shard optimizer state of full parameters: each rank updates its rows. Both markers are the identity:
`OWN_ROWS` stands for the rows of a parameter updated by a rank (then a view of the parameter's own memory),
`SHARE_ROWS` puts the rows of all ranks into the full parameter after the update (an all-gather and a copy).

Reshard after forward frees gathered parameters after forward, and gathers them again for backward. It marks sharded
parameters with their views and casts in forward. A marked parameter is gathered once for each half of the step, and
its views are taken again: forward's would keep the gathered parameter alive.

Gradient accumulation repeats forward and backward for micro-batches, and runs the optimizer once. Gradients of the
micro-batches are averaged before they are reduced, so there is one reduction per step; for losses that are means over
rows the step equals one on the full batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.capture.phases import TAG_GRAD, library
from dp_partition.capture.tracer import Capture
from dp_partition.nodes import aten, base_of, kind_of, meta_of, mutated_inputs, substitution, viewed_input
from dp_partition.sharding.propagate import gradient_name, is_gradient

library.define("own_rows(Tensor(a) self) -> Tensor(a)")
library.define("share_rows(Tensor(a!) self, Tensor rows) -> ()")
library.impl("own_rows", lambda param: param, "CompositeExplicitAutograd")
library.impl("share_rows", lambda param, rows: None, "CompositeExplicitAutograd")

OWN_ROWS: Any = torch.ops.dp_partition.own_rows.default
SHARE_ROWS: Any = torch.ops.dp_partition.share_rows.default


def update_own_rows(graph: fx.Graph, names: Collection[str]) -> None:
    """Make nodes after the last gradient work on the rank's rows of named parameters."""
    nodes = list(graph.nodes)
    last = max((position for position, node in enumerate(nodes) if is_gradient(node)), default=-1)
    if last < 0:  # no gradient, so no update
        return
    late = dict.fromkeys(node for node in nodes[last + 1 :] if node.op != "output")  # ordered, for the insertion point
    output = nodes[-1]
    for node in nodes:
        if kind_of(node) != "param" or meta_of(node)["input"].name not in names:
            continue
        early = [node, *_early_views(node, late)]
        users = {user for alias in early for user in alias.users if user in late}
        if not users:
            continue
        with graph.inserting_before(next(user for user in late if user in users)):
            rows = graph.call_function(OWN_ROWS, (node,))
            meta_of(rows).update({"val": node.meta["val"], "phase": "optimizer"})
            again = {node: rows}
            for view in early[1:]:  # views of the updated rows
                again[view] = graph.node_copy(view, substitution(again))
                meta_of(again[view])["phase"] = "optimizer"
        for alias in early:
            for user in [user for user in alias.users if user in users]:
                user.replace_input_with(alias, again[alias])
        with graph.inserting_before(output):
            share = graph.call_function(SHARE_ROWS, (node, rows))
        meta_of(share).update({"val": None, "phase": "optimizer"})


def _early_views(node: fx.Node, late: Collection[fx.Node]) -> list[fx.Node]:
    """Return early views of a parameter with late uses, each after its base."""
    views: list[fx.Node] = []
    for user in node.users:
        if user not in late and base_of(user) is node:
            behind = _early_views(user, late)
            if behind or any(item in late for item in user.users):
                views += [user, *behind]
    return views


def reshard_after_forward(graph: fx.Graph, placements: Mapping[fx.Node, Placement], mode: bool | frozenset[str]) -> int:
    """Mark the parameters to gather twice: all used in both halves, none, or the named of them; return their number."""
    if mode is False:
        return 0
    nodes = list(graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    sharded = [n for n in nodes if kind_of(n) == "param" and isinstance(placements[n], Shard)]
    if isinstance(mode, frozenset):
        sharded = [n for n in sharded if meta_of(n)["input"].name in mode]
    chosen = [derived for node in sharded if (derived := _idle(node, place))]
    for derived in chosen:
        for node in derived:
            meta_of(node)["gather_again"] = True
    return len(chosen)


def _idle(node: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return a parameter's views and casts in forward, if unused between forward and backward.

    Empty otherwise, or if forward or backward write it or a cast of it.
    """
    derived: list[fx.Node] = []
    queue = [node]
    while queue:
        for user in queue.pop().users:
            follows = viewed_input(user) is not None or user.target is aten._to_copy.default
            if follows and meta_of(user).get("phase") == "forward" and user not in derived:
                derived.append(user)
                queue.append(user)
    users = [user for item in (node, *derived) for user in item.users if user not in derived]
    if any(set(mutated_inputs(user)) & {node, *derived} for user in users if meta_of(user).get("phase") != "optimizer"):
        return []  # a second gather or cast would lack the written values
    forward = [place[user] for user in users if meta_of(user).get("phase") == "forward"]
    backward = [place[user] for user in users if meta_of(user).get("phase") == "backward"]
    if not forward or not backward or max(forward) >= min(backward):
        return []  # no pause between them
    return [node, *derived]


def repeat_for_microbatches(capture: Capture, count: int, dim: int) -> None:
    """Make a canonical graph traced for one micro-batch process ``count`` of them, in place.

    Raises:
        PlanError: Something other than gradients and scalar results leaves the backward pass.
    """
    graph = capture.module.graph
    nodes = list(graph.nodes)
    last = max((position for position, node in enumerate(nodes) if node.target is TAG_GRAD), default=-1)
    if last < 0:
        raise PlanError(Problem("cannot-accumulate", "accumulate", found="the step has no backward pass"))
    body = [n for n in nodes[: last + 1] if n.op != "placeholder"]  # forward and backward
    rest = nodes[last + 1 :]  # optimizer and outputs
    crossing = _crossing(body, set(rest))  # raises before the graph changes
    values: Any = nodes[-1].args[0]
    means = frozenset(place for place, value in enumerate(values) if value in crossing)
    capture.returned = replace(capture.returned, means=means)
    slices = _slice_batch(graph, nodes, body[0], count, dim)
    copies: list[dict[fx.Node, fx.Node]] = [{node: node for node in body}]  # first: the original
    for index in range(1, count):
        copies.append({arg: parts[index] for arg, parts in slices.items()})
        with graph.inserting_before(rest[0]):
            for node in body:
                copies[index][node] = graph.node_copy(node, substitution(copies[index]))
    for arg, parts in slices.items():
        for user in [user for user in arg.users if user in copies[0]]:
            user.replace_input_with(arg, parts[0])
    for node in crossing:
        with graph.inserting_before(rest[0]):
            total = copies[0][node]
            for copy in copies[1:]:
                total = _call(graph, aten.add.Tensor, total, copy[node])
            mean = _call(graph, aten.div.Scalar, total, count)
        if node.target is TAG_GRAD:
            meta_of(mean)["mean_gradient"] = gradient_name(node)
        for user in [user for user in node.users if user in rest]:
            user.replace_input_with(node, mean)


def _crossing(body: list[fx.Node], rest: set[fx.Node]) -> list[fx.Node]:
    """Return values passed from the repeated part to the optimizer or the caller. Refuse those without a mean."""
    crossing, problems = [], []
    for node in body:
        users = [user for user in node.users if user in rest]
        if not users:
            continue
        value = node.meta.get("val")
        scalar = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 0
        if node.target is TAG_GRAD or _copies_gradient(node) or (scalar and all(user.op == "output" for user in users)):
            crossing.append(node)
        elif node.op != "get_attr":
            hint = "return scalar results only, and use nothing but gradients after backward"
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            problems.append(Problem("cannot-accumulate", node.name, found=f"{shape} leaves the backward", hint=hint))
    if problems:
        raise PlanError(problems, "the step cannot be run on micro-batches")
    return crossing


def _copies_gradient(node: fx.Node) -> bool:
    """Return True if autograd copies a gradient here. A view gets memory with its parameter's strides."""
    written = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
    sources = [user.args[1] for user in written]
    is_new = node.target in (aten.new_empty_strided.default, aten.new_empty.default, aten.empty_like.default)
    if not is_new or len(sources) != 1:
        return False
    source: Any = sources[0]
    while isinstance(source, fx.Node) and source.target is not TAG_GRAD:
        source = base_of(source)
    return isinstance(source, fx.Node)


def _slice_batch(
    graph: fx.Graph, nodes: list[fx.Node], before: fx.Node, count: int, dim: int
) -> dict[fx.Node, list[fx.Node]]:
    """Slice every batch placeholder into micro-batches; its value becomes the full batch."""
    slices: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        value: Any = node.meta.get("val")
        if kind_of(node) != "arg" or value is None or value.ndim <= dim:
            continue
        size = value.shape[dim]  # of one micro-batch
        slices[node] = []
        for i in range(count):
            with graph.inserting_before(before):
                part = graph.call_function(aten.slice.Tensor, (node, dim, i * size, (i + 1) * size))
                meta_of(part).update({"val": value, "phase": "forward"})
                if dim > 0:  # the trace took views of a contiguous micro-batch
                    part = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
                    meta_of(part).update({"val": value, "phase": "forward"})
            slices[node].append(part)
        node.meta["val"] = value.repeat_interleave(count, dim)
    return slices


def _call(graph: fx.Graph, target: Any, first: fx.Node, second: Any) -> fx.Node:
    node = graph.call_function(target, (first, second))
    meta_of(node).update({"val": first.meta["val"], "phase": "backward"})
    return node
