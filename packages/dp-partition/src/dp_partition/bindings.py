"""A graph's code with the operators called as people call them: ``x.view(...)`` instead of ``torch.ops.aten.view``.

Both run the same operator, but one from ``torch.ops`` takes its arguments from Python several times slower than torch's
generated bindings do, which a step of small operators feels at every one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition.ops import aten

METHODS: dict[Any, str] = {
    aten.contiguous.default: "contiguous",
    aten.expand.default: "expand",
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.sum.dim_IntList: "sum",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.unbind.int: "unbind",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "view",
}

FUNCTIONS: dict[Any, Any] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.stack.default: torch.stack,
    aten.sub.Tensor: torch.sub,
}


def use_bindings(graph: fx.Graph) -> None:
    """Let a graph call operators through their bindings, in place."""
    for node in graph.nodes:
        if node.op != "call_function" or not _is_bound(node):
            continue
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]


def _is_bound(node: fx.Node) -> bool:
    """Whether the binding takes the arguments for the same overload: tensors where the operator takes tensors."""
    if node.target is aten.sum.dim_IntList:
        return isinstance(node.args[1], list | tuple) and len(node.args[1]) > 0
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
        other = node.args[1] if len(node.args) > 1 else None
        return isinstance(other, fx.Node) and isinstance(other.meta.get("val"), torch.Tensor)
    return bool(node.args)


__all__ = ["FUNCTIONS", "METHODS", "use_bindings"]
