"""A rank's graph as text: one line a node, with what it is to the step, local shape and where it comes from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition._shared.page import human_bytes
from dp_partition.analysis.comms import name_of, num_bytes, tensors_of
from dp_partition.analysis.formatting import table
from dp_partition.capture.node_meta import meta_of, phases_of
from dp_partition.ops import is_collective, is_op
from dp_partition.plan.placements import NodeType

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


def listing(graph: fx.Graph) -> str:
    """The graph with local shapes and node types, under a heading for each phase."""
    head = ("node", "type", "local value", "is")
    rows = [(node.name, node_type(node), shape_text(node), call_text(node)) for node in graph.nodes]
    first, rule, *lines = table(head, rows).splitlines()
    shown, phase = [first, rule], ""
    for node, line, part in zip(graph.nodes, lines, phases_of(graph), strict=True):
        now = "inputs" if node.op == "placeholder" else part
        if now != phase and node.op != "output":
            shown.append(f"# {now}")
            phase = now
        shown.append(line)
    return "\n".join(shown)


def node_type(node: fx.Node) -> str:
    """Return the role of a node in the step, in one word."""
    kind = meta_of(node).get("node_type")
    if is_collective(node):
        return "SEND"
    if name_of(node) is not None and node.op != "placeholder":
        return NodeType.GRAD.name
    return kind.name if isinstance(kind, NodeType) and kind is not NodeType.NON_TENSOR else "-"


def shape_text(node: fx.Node) -> str:
    """Dtype and local shape of what a node holds, as ``f32[4, 8]``."""
    tensors = tensors_of(node)
    if not tensors:
        return "-"
    text = ", ".join(_one(tensor) for tensor in tensors[:3])
    return text if len(tensors) <= 3 else f"{len(tensors)} tensors, {human_bytes(sum(map(num_bytes, tensors)))}"


def _one(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{_SHORT.get(dtype, dtype)}{list(tensor.shape)}"


def call_text(node: fx.Node) -> str:
    """Return the operator of a node and its arguments, or the input that it is, as text."""
    if node.op == "placeholder":
        entry = meta_of(node).get("input")
        return f"input: {entry.label}" if entry is not None else "input"
    if node.op == "output":
        return f"returns {_argument(node.args[0])}"
    target: Any = node.target
    name = str(target) if is_op(node) else getattr(target, "__name__", str(target))
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    owner = name_of(node)
    return f"{name}({', '.join(arguments)})" + (f"  # gradient of {owner}" if owner else "")


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = [_argument(one) for one in value[:6]]
        return f"[{', '.join(shown)}{f', ... {len(value) - 6} more' if len(value) > 6 else ''}]"
    return value.name if isinstance(value, fx.Node) else str(value)


def show_listing(module: fx.GraphModule) -> fx.GraphModule:
    """Let ``print(module)`` show the listing. fx gives every graph module a class of its own."""
    kind: Any = type(module)
    kind.__str__ = lambda self: listing(self.graph)
    return module
