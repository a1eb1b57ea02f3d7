"""Gradient accumulation: forward and backward repeated for micro-batches, the optimizer run once.

A pass over the captured graph of one micro-batch. Gradients of the micro-batches are averaged before they are
reduced, so there is one reduction per step; for losses that are means over rows the step equals one on the full batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.capture.tracer import Capture
from dp_partition.nodes import aten, base_of, kind_of, meta_of, substitution
from dp_partition.sharding.propagate import gradient_name


def repeat_for_microbatches(capture: Capture, count: int, dim: int) -> None:
    """Make a graph traced for one micro-batch process ``count`` of them, in place.

    Args:
        capture: A canonical capture; its batch placeholders have ``count`` times as many rows afterwards.
        count: Number of micro-batches.
        dim: Batch dim of the tensor arguments.

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
            problems.append(
                Problem("cannot-accumulate", node.name, found=f"{shape} leaves the backward pass", hint=hint)
            )
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
