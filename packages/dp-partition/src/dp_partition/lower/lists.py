"""Operators on lists of tensors, taken apart: the same operator on one tensor after the other.

Inductor fuses what is element-wise by itself, and numbers that a schedule changes can be inputs of single operators.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from dp_partition.ops import aten, is_op

_NAMED = ("add", "sub", "mul", "div")
_PLAIN = ("sqrt", "rsqrt", "neg", "abs", "exp", "reciprocal", "sign", "zero", "maximum", "minimum", "copy")
_THREE = ("addcmul", "addcdiv")


def take_lists_apart(graph: fx.Graph) -> None:
    """Replace ``_foreach_*`` operators, in place; those of other kinds stay."""
    for node in list(graph.nodes):
        if is_op(node) and node.target._schema.name.startswith("aten::_foreach_"):
            name = node.target._schema.name.removeprefix("aten::_foreach_")
            inplace = name.endswith("_")
            single = _single(name.rstrip("_"), node.target._overloadname, inplace)
            if single is not None:
                _replace(graph, node, single, inplace)


def _single(name: str, overload: str, inplace: bool) -> Any:
    """The operator on one tensor; None where there is none."""
    packet = getattr(aten, name + "_" * inplace, None)
    if packet is None:
        return None
    if name in _NAMED:
        return packet.Tensor
    if name in _PLAIN or name in _THREE:
        return packet.default
    if name == "lerp":
        return packet.Tensor if overload == "List" else packet.Scalar
    if name == "pow" and overload in ("Scalar", "ScalarList"):
        return packet.Scalar if inplace else packet.Tensor_Scalar
    return None


def _replace(graph: fx.Graph, node: fx.Node, single: Any, inplace: bool) -> None:
    lists: list[Any] = list(node.args)
    count = len(lists[0])
    values: Any = node.meta.get("val")
    results = []
    scalars = single._schema.name.rsplit("::", 1)[1].rstrip("_") in _THREE
    with graph.inserting_before(node):
        for index in range(count):
            args = [_element(one, index) for one in lists]
            kwargs = {key: _element(one, index) for key, one in node.kwargs.items()}
            if scalars and len(args) == 4:
                kwargs["value"] = args.pop()
            result = graph.call_function(single, tuple(args), kwargs)
            first = lists[0][index]
            result.meta.update(phase=node.meta.get("phase"), val=first.meta["val"] if inplace else values[index])
            results.append(result)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
            graph.erase_node(user)
    graph.erase_node(node)


def _element(argument: Any, index: int) -> Any:
    return argument[index] if isinstance(argument, list | tuple) else argument


__all__ = ["take_lists_apart"]
