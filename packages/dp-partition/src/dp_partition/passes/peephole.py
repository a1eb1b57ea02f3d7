"""Local rewrites of a rank's graph: packing that is not needed, contiguous tensors for fused kernels."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dp_partition.capture.node_meta import copy_notes, meta_of
from dp_partition.ops import arguments, aten, base_of, is_op, mutated_inputs, set_argument


def send_alone(graph: fx.Graph) -> None:
    """Send a gradient alone in its bucket without a copy, if nothing else uses its memory.

    Args:
        graph: A graph without gradient tags, which is changed. Reductions work in place, on the packed buffer.
    """
    for packing in [node for node in graph.nodes if meta_of(node).pop("packs", False)]:
        rows: Any = packing.args[0]
        if len(rows) == 1 and _only_source(rows[0]) is not None and _is_contiguous(_gradient(rows[0])):
            packing.replace_all_uses_with(rows[0])
            graph.erase_node(packing)


def _only_source(row: fx.Node) -> fx.Node | None:
    """Return the producer of a flat gradient, if nothing else uses its memory: views have one user each."""
    node = row
    while len(node.users) == 1:
        base = base_of(node)
        if base is None:
            is_pure = (is_op(node) or node.target is operator.getitem) and not mutated_inputs(node)
            return node if is_pure else None
        node = base
    return None


def _gradient(row: fx.Node) -> fx.Node:
    """Return the gradient before it was made flat."""
    return row if "val" in row.meta else row.all_input_nodes[0]


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def make_contiguous_for_fused(graph: fx.Graph) -> None:
    """Give every fused optimizer kernel of a rank's graph contiguous tensors, in place."""
    for node in list(graph.nodes):
        if is_op(node) and node.target._schema.name.startswith("aten::_fused_"):
            strided = [index for index, param in enumerate(node.args[0]) if _is_strided(param)]
            if strided:
                _use_copies(graph, node, strided)


def _is_strided(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and not value.is_contiguous()


def _use_copies(graph: fx.Graph, node: fx.Node, indices: list[int]) -> None:
    written: list[tuple[fx.Node, fx.Node]] = []
    for argument, value in list(arguments(node)):
        if not isinstance(value, list | tuple) or not value or argument.name == "state_steps":  # scalars
            continue
        members = list(value)  # others stay as they are
        for index in indices:
            with graph.inserting_before(node):
                copied = graph.call_function(  # fused kernels go by memory, not by strides
                    aten.clone.default, (members[index],), {"memory_format": torch.contiguous_format}
                )
            copy_notes(members[index], copied, "node_type")
            copy_notes(node, copied, "phase")
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
                written.append((members[index], copied))
            members[index] = copied
        set_argument(node, argument.name, members)
    with graph.inserting_after(node):
        for original, copied in reversed(written):  # each goes right after the kernel
            back = graph.call_function(aten.copy_.default, (original, copied))  # results, in the old strides
            copy_notes(node, back, "phase")
