"""Gradients are computed where they are sent: a matrix product writes its rows of the bucket itself.

Packing a bucket costs a copy of every gradient, and for a moment the memory of all of them twice. A gradient that
nothing else looks at needs neither: where a matrix product makes it, the product writes into the bucket; a gradient
that travels alone is sent as it is. What is left over (biases, norms, convolutions) is copied in one call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dp_partition.ops import aten, base_of, is_op, mutated_inputs
from dp_partition.styles import NodeType

# Where memory begins that kernels are fastest on, and bit for bit the same on: what torch's CPU allocator gives.
ALIGNMENT = 64


def mark_packing(node: fx.Node, sizes: list[int], like: torch.Tensor) -> None:
    """Say of a node that it packs flat gradients of these sizes for a reduction in place."""
    node.meta["packs"] = sizes, like


def compute_in_buckets(graph: fx.Graph, in_place: bool) -> None:
    """Let gradients be computed in their buckets; for a graph without gradient tags, which is changed.

    Args:
        graph: The graph.
        in_place: Else packing becomes a part of backward as others are: a compiler that sees products and packing at
            once lets the products write into the bucket by itself. Where something else looks at a gradient it must
            not see them at once: that gradient would lie in memory that is reduced.
    """
    for packing in [node for node in graph.nodes if "packs" in node.meta]:
        sizes, like = packing.meta.pop("packs")
        rows = list(packing.args[0])
        sources = [_only_source(row) for row in rows]
        if not in_place:
            if None not in sources:
                for node in (packing, *rows):
                    node.meta.setdefault("phase", "backward")
            continue
        if len(rows) == 1:
            if sources[0] is not None and _is_contiguous(_gradient(rows[0])):
                packing.replace_all_uses_with(rows[0])
                graph.erase_node(packing)
            continue
        offsets = [sum(sizes[:index]) * like.dtype.itemsize for index in range(len(sizes))]
        products = {
            index: source
            for index, source in enumerate(sources)
            if source is not None and _can_write(source, rows[index], like) and offsets[index] % ALIGNMENT == 0
        }
        if products:
            _write_into(graph, packing, sizes, products)


def _only_source(row: fx.Node) -> fx.Node | None:
    """The node that makes a flat gradient, if nothing else looks at its memory: views have one user each."""
    node = row
    while len(node.users) == 1:
        base = base_of(node)
        if base is None:
            made = (is_op(node) or node.target is operator.getitem) and not mutated_inputs(node)
            return node if made else None
        node = base
    return None


def _gradient(row: fx.Node) -> fx.Node:
    """The gradient that is packed flat."""
    return row if "val" in row.meta else row.all_input_nodes[0]


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _can_write(source: fx.Node, row: fx.Node, like: torch.Tensor) -> bool:
    """Whether the source is a product whose memory, row by row, is the flat gradient."""
    made: Any = source.meta.get("val")
    same = isinstance(made, torch.Tensor) and made.is_contiguous() and made.dtype == like.dtype
    return source.target is aten.mm.default and same and _is_contiguous(_gradient(row))


def _write_into(graph: fx.Graph, packing: fx.Node, sizes: list[int], products: dict[int, fx.Node]) -> None:
    """Make the bucket before its first product, and let all products write there."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    rows: Any = packing.args[0]
    first = min(products.values(), key=order.__getitem__)
    with graph.inserting_before(first):
        bucket = _call(graph, aten.new_empty.default, first.args[0], [sum(sizes)])
        pieces = _call(graph, aten.split_with_sizes.default, bucket, sizes)
        slots = [_call(graph, operator.getitem, pieces, index) for index in range(len(sizes))]
        for index, product in products.items():
            slots[index] = _call(graph, aten.view.default, slots[index], list(product.meta["val"].shape))
    rest = [index for index in range(len(sizes)) if index not in products]
    with graph.inserting_before(packing):
        if rest:
            _call(graph, aten._foreach_copy_.default, [slots[i] for i in rest], [rows[i] for i in rest])
    bucket.meta["carries"] = [name for row in rows for name in [_gradient(row).meta.get("gradient")] if name]
    packing.replace_all_uses_with(bucket)
    graph.erase_node(packing)
    for index, product in products.items():
        name = _gradient(rows[index]).meta.get("gradient")
        _erase_views(graph, rows[index], product)
        product.target = aten.mm.out
        product.kwargs = {"out": slots[index]}
        if name:
            product.meta["gradient"] = name


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["node_type"] = NodeType.GRAD
    return node


def _erase_views(graph: fx.Graph, node: fx.Node, until: fx.Node) -> None:
    while node is not until:
        previous = node.all_input_nodes[0]
        graph.erase_node(node)
        node = previous


__all__ = ["ALIGNMENT", "compute_in_buckets", "mark_packing"]
