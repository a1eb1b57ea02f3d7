"""Numbers that change from step to step: worked out in Python, given to compiled code as elements of one tensor.

A learning rate, or a power of a step counter, is a Python number in the graph. Compiled code must not depend on its
value, so each operator that takes such a number is written with a 0-dim tensor instead, in the same arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dp_partition.capture.node_meta import copy_notes, kind_of, meta_of
from dp_partition.ops import aten, is_op, mutated_inputs

Ref = Callable[[Any, torch.dtype], Any]
"""Gives an argument as a tensor of a dtype: a number as an element of the numbers, everything else as it is."""


def is_number(node: fx.Node) -> bool:
    """Return whether the node's value is a Python number."""
    if node.op == "placeholder":
        return kind_of(node) == "hyper"
    return node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def numbers_of(node: fx.Node) -> list[fx.Node]:
    """The numbers among a node's inputs."""
    return [source for source in node.all_input_nodes if is_number(source)]


def takes_tensors(node: fx.Node) -> bool:
    """Return whether an operator that takes numbers can be written with tensors in the same arithmetic."""
    if not is_op(node) or node.target not in _WRITTEN:
        return False
    first = node.args[0] if isinstance(node.args[0], fx.Node) else None
    value = first.meta.get("val") if first is not None else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)


def write(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], number: Ref) -> fx.Node:
    """A call like ``node``'s with tensors for its numbers."""
    dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    given = [number(one, dtype) for one in args]
    named = {key: number(one, dtype) for key, one in kwargs.items()}
    result = _WRITTEN[node.target](graph, given, named)
    if mutated_inputs(node):
        return graph.call_function(aten.copy_.default, (given[0], result))
    return result


def _binary(op: Any) -> Callable[..., fx.Node]:
    def call(graph: fx.Graph, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        one, other = args
        if "alpha" in kwargs:
            other = graph.call_function(aten.mul.Tensor, (other, kwargs["alpha"]))
        return graph.call_function(op, (one, other))

    return call


def _lerp(graph: fx.Graph, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    return graph.call_function(aten.lerp.Tensor, tuple(args))


def _three(op: Any) -> Callable[..., fx.Node]:
    def call(graph: fx.Graph, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        one, first, second = args
        scaled = graph.call_function(aten.mul.Tensor, (first, kwargs["value"]))
        return graph.call_function(aten.add.Tensor, (one, graph.call_function(op, (scaled, second))))

    return call


_WRITTEN: dict[Any, Callable[..., fx.Node]] = {
    aten.lerp.Scalar: _lerp,
    aten.lerp_.Scalar: _lerp,
    aten.addcmul.default: _three(aten.mul.Tensor),
    aten.addcmul_.default: _three(aten.mul.Tensor),
    aten.addcdiv.default: _three(aten.div.Tensor),
    aten.addcdiv_.default: _three(aten.div.Tensor),
    aten.pow.Tensor_Scalar: _binary(aten.pow.Tensor_Tensor),
    aten.pow_.Scalar: _binary(aten.pow.Tensor_Tensor),
}
for _name in ("add", "sub", "mul", "div"):
    for _packet in (getattr(aten, _name), getattr(aten, _name + "_")):
        for _overload in ("Tensor", "Scalar"):
            _WRITTEN[getattr(_packet, _overload)] = _binary(getattr(aten, _name).Tensor)


def hoist_scalars(graph: fx.Graph) -> None:
    """Let the numbers of the optimizer be worked out in one place, before the first update, in place.

    They depend on hyperparameters and on step counters, which they may count up; between updates they would cut
    compiled code into small pieces.
    """
    there = {node for node in graph.nodes if _is_counter(node) or (node.op == "placeholder" and is_number(node))}
    first: fx.Node | None = None
    for node in list(graph.nodes):
        if meta_of(node).get("phase") != "optimizer" or node.op != "call_function":
            continue
        counts = any(_counts(node, source) for source in node.all_input_nodes)
        if (is_number(node) or counts) and all(source in there for source in node.all_input_nodes):
            there.add(node)
            if first is not None:
                first.append(node)
            first = node


def _is_counter(node: fx.Node) -> bool:
    """Return whether a placeholder is a 0-dim state that the graph only counts up and reads as a number."""
    value: Any = node.meta.get("val")
    if kind_of(node) != "state" or value.ndim:
        return False
    return all(user.target is aten._local_scalar_dense.default or _counts(user, node) for user in node.users)


def _counts(user: fx.Node, node: fx.Node) -> bool:
    return mutated_inputs(user) == [node] and user.all_input_nodes == [node] and not user.users


_NAMED = ("add", "sub", "mul", "div")
_PLAIN = ("sqrt", "rsqrt", "neg", "abs", "exp", "reciprocal", "sign", "zero", "maximum", "minimum", "copy")
_THREE = ("addcmul", "addcdiv")


def unroll_foreach(graph: fx.Graph) -> None:
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
            copy_notes(node, result, "phase")
            result.meta["val"] = first.meta["val"] if inplace else values[index]
            results.append(result)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
            graph.erase_node(user)
    graph.erase_node(node)


def _element(argument: Any, index: int) -> Any:
    return argument[index] if isinstance(argument, list | tuple) else argument
