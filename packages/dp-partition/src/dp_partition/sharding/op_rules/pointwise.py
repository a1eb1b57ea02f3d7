"""Elementwise operators, alone and over lists (``_foreach_*``, ``_fused_*``), with broadcasting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

from dp_partition.ops import arguments, nodes_in
from dp_partition.sharding.op_rules.table import Call, Candidate, OutputPlacement, R, cheapest

# f(a + b) == f(a) + f(b) in the one partial argument, if the others are equal on every rank.
LINEAR_IN_ONE = frozenset(["neg", "clone", "_to_copy", "mul", "div", "alias", "detach", "tag_grad", "lift_fresh_copy"])
# f(a, b) with both partial.
LINEAR_IN_ALL = frozenset(["add", "sub"])
KEEPS_NORMS = frozenset(["clone", "_to_copy", "alias", "detach"])

# Elementwise, but without torch's tag for it.
EXTRA_POINTWISE = frozenset([
    "_to_copy", "native_dropout", "copy", "fill", "zero", "lift_fresh_copy", "tag_grad", "zeros_like", "ones_like",
    "full_like", "empty_like", "rand_like", "randn_like", "bernoulli", "masked_fill", "where", "detach",
    "hardtanh_backward", "elu_backward", "leaky_relu_backward", "softplus_backward", "alias", "uniform", "normal",
    "exponential", "hardswish_backward", "hardsigmoid_backward",
])  # fmt: skip
_FACTORY_LIKE = frozenset(["zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"])


def pointwise(call: Call) -> Iterator[Candidate]:
    """Shard the output like sharded operands; let partial operands through linear operators."""
    value = call.node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    shape = tuple(first.shape) if isinstance(first, torch.Tensor) else ()
    for inputs, placement in operand_ways(call, call.name, call.tensors(), len(shape)):
        yield Candidate(inputs, call.outputs(placement))


def operand_ways(
    call: Call, name: str, operands: list[fx.Node], ndim: int
) -> Iterator[tuple[dict[fx.Node, Placement], Placement]]:
    """Yield operand and output placements for one broadcast element of an elementwise operator."""
    if call.may_stay_partial or not any(node in call.desired for node in operands):
        yield from _partial_ways(call, name, operands)
    dims = dict.fromkeys(dim + ndim - len(call.shape(node)) for node, dim in call.shards(operands))
    for dim in dims:
        inputs: dict[fx.Node, Placement] = {}
        own_dims = {node: dim - (ndim - len(call.shape(node))) for node in operands}
        sizes = {node: call.shape(node)[own] for node, own in own_dims.items() if own >= 0}
        stretched = any(size != 1 for size in sizes.values())  # a single row among single rows is a shard like others
        for node, own in own_dims.items():
            full = own < 0 or (sizes[node] == 1 and stretched and call.placement_of(node) != Shard(own))
            inputs[node] = R if full else Shard(own)
        yield inputs, Shard(dim)
    yield dict.fromkeys(operands, R), R


def _partial_ways(
    call: Call, name: str, operands: list[fx.Node]
) -> Iterator[tuple[dict[fx.Node, Placement], Placement]]:
    partial = [node for node in operands if isinstance(call.placement_of(node), Partial)]
    if not partial:
        return
    kind = call.placement_of(partial[0])
    assert isinstance(kind, Partial)
    if name in _FACTORY_LIKE:
        yield {partial[0]: kind}, R  # only the shape is used
        return
    if not is_linear_dtype(call):
        return
    if kind.reduce_op not in ("sum", "avg"):
        if name in KEEPS_NORMS and len(operands) == 1:
            yield {partial[0]: kind}, kind
        return
    base = name.removeprefix("_foreach_")
    if call.named("rounding_mode") is not None:
        return  # rounding is not linear
    others_equal = all(call.placement_of(node) == R for node in operands if node is not partial[0])
    divides = base == "div" and partial[0] not in nodes_in(call.arg(0))
    # Linear in one argument, not in one node: in `s * s` the squares of partial values are not partial squares.
    stands = sum(node is partial[0] for _, value in arguments(call.node) for node in nodes_in(value))
    if len(partial) == 1 and stands == 1 and base in LINEAR_IN_ONE and others_equal and not divides:
        yield {node: (kind if node is partial[0] else R) for node in operands}, kind
    if base in LINEAR_IN_ALL and len(operands) > 1 and all(call.placement_of(node) == kind for node in operands):
        yield dict.fromkeys(operands, kind), kind


def is_linear_dtype(call: Call) -> bool:
    """Return True if the output keeps fractions. A sum of rounded parts is not the rounded sum."""
    value = call.node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return all(v.is_floating_point() or v.is_complex() for v in values if isinstance(v, torch.Tensor))


def foreach(call: Call) -> Iterator[Candidate]:
    """Lists of tensors: every position is an elementwise operator, with its own cheapest strategy."""
    values = [value for _, value in arguments(call.node)]
    lists = [list(v) for v in values if isinstance(v, list | tuple) and v and all(map(_is_tensor_node, v))]
    singles = [value for value in values if _is_tensor_node(value)]
    if not lists:
        return
    inputs: dict[fx.Node, Placement] = dict.fromkeys(singles, R)
    outputs: list[OutputPlacement] = []
    for position in range(max(len(nodes) for nodes in lists)):
        operands = list(dict.fromkeys(nodes[position] for nodes in lists if position < len(nodes)))
        ndim = max(len(call.shape(node)) for node in operands)
        ways = (Candidate(dict(way), placement) for way, placement in operand_ways(call, call.name, operands, ndim))
        best = cheapest(call, ways, operands)  # other positions' tensors do not count here
        if best is None:
            return
        inputs.update({node: best.inputs[node] for node in operands})
        outputs.append(best.output)
    yield Candidate(inputs, tuple(outputs) if isinstance(call.node.meta.get("val"), tuple | list) else None)


def _is_tensor_node(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
