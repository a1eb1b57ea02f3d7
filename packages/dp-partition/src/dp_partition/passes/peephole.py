"""Contiguous tensors for fused optimizer kernels, which go by memory and not by strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition.capture.node_meta import copy_notes
from dp_partition.ops import arguments, aten, is_op, set_argument


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
