"""Views that look at memory just as something before them does are left out.

Autograd takes views of views: a linear layer's backward turns a gradient to rows and back, and turns a weight that was
turned in forward. Each costs a call of Python at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition.ops import base_of, mutated_inputs


def drop_idle_views(graph: fx.Graph, traced: set[fx.Node]) -> None:
    """Let users of a view use what it is equal to, in place; what the step returns stays as it is.

    Args:
        graph: A rank's graph.
        traced: Its nodes that the single device's graph has too. Equal are shape, strides and place of their values
            there, which views of a shard follow; what was inserted for a rank holds other values than it was made for.
    """
    for node in list(graph.nodes):
        equal = _equal_before(node, traced)
        if equal is not None:
            if "gradient" in node.meta:
                equal.meta.setdefault("gradient", node.meta["gradient"])
            node.replace_all_uses_with(equal, lambda user: user.op != "output")
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and base_of(node) is not None and not mutated_inputs(node):
            graph.erase_node(node)


def _equal_before(node: fx.Node, traced: set[fx.Node]) -> fx.Node | None:
    """The first of the nodes that it is a view of, and that is the same tensor."""
    found, base = None, base_of(node) if node.op == "call_function" and node in traced else None
    while base is not None and base in traced and _value(base) is not None:
        if _place(base) == _place(node):
            found = base
        base = base_of(base)
    return found


def _value(node: fx.Node) -> torch.Tensor | None:
    value: Any = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _place(node: fx.Node) -> Any:
    value = _value(node)
    if value is None:
        return None
    bits = value.is_conj(), value.is_neg()  # views that differ in nothing else: what is read of them is another number
    return value.shape, value.stride(), value.storage_offset(), value.dtype, bits


__all__ = ["drop_idle_views"]
