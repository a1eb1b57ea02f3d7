"""Fused optimizer kernels walk through memory: parameter, gradient and state must lie alike there.

Eager autograd gives a gradient the strides of its parameter, but a gradient that was reduced comes out of a flat
buffer, and the rows of a transposed weight have gaps. Where a parameter is not contiguous, the kernel gets contiguous
copies of all that belongs to it, and what it wrote is copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition.ops import arguments, aten, is_op


def lay_out_alike(graph: fx.Graph) -> None:
    """Give every fused optimizer kernel of a rank's graph tensors that lie alike, in place."""
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
        if not isinstance(value, list | tuple) or not value or argument.name == "state_steps":
            continue
        members = list(value)
        for index in indices:
            with graph.inserting_before(node):
                copied = graph.call_function(
                    aten.clone.default, (members[index],), {"memory_format": torch.contiguous_format}
                )
            copied.meta.update({k: v for k, v in members[index].meta.items() if k in ("node_type", "phase")})
            copied.meta["phase"] = node.meta.get("phase")
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
                written.append((members[index], copied))
            members[index] = copied
        _replace(node, argument.name, members)
    with graph.inserting_after(node):
        for original, copied in reversed(written):
            back = graph.call_function(aten.copy_.default, (original, copied))
            back.meta["phase"] = node.meta.get("phase")


def _replace(node: fx.Node, name: str, members: list[fx.Node]) -> None:
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if position < len(node.args):
                node.update_arg(position, members)
            else:
                node.update_kwarg(name, members)


__all__ = ["lay_out_alike"]
