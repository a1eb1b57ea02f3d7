"""Rules of operators: matrix products, layers, reductions, elementwise operators, views, and the way to find one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

from dp_partition.nodes import arguments, base_name, is_tensor, nodes_in, tensors_of
from dp_partition.sharding.rule_table import RULES, SUM, Call, Candidate, OutputPlacement, R, Rule, cheapest, rule


# Matrix products: rows follow the left operand, columns the right; sharded contractions leave partial sums.
def _product_ways(
    call: Call, left: fx.Node, right: fx.Node, batched: int
) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield ``(left, right, output)`` placements of a product with ``batched`` leading batch dims."""
    rows, inner, columns = batched, batched + 1, batched + 1
    for dim in range(batched):  # independent products
        yield Shard(dim), Shard(dim), Shard(dim)
    if call.rounds:
        return
    yield Shard(rows), R, Shard(rows)
    yield R, Shard(columns), Shard(columns)
    if call.splits(left, inner):
        yield Shard(inner), Shard(batched), SUM
    for kind in (call.placement_of(left), call.placement_of(right)):
        if isinstance(kind, Partial) and kind.reduce_op in ("sum", "avg"):
            yield kind, R, kind
            yield R, kind, kind


def _is_worth_it(call: Call, nodes: list[fx.Node], wanted: list[Placement]) -> bool:
    """Return True for strategies with an existing shard or partial value. New splits save no bytes."""
    return any(call.placement_of(node) == way and way != R for node, way in zip(nodes, wanted, strict=True))


@rule("mm", "bmm")
def product(call: Call) -> Iterator[Candidate]:
    left, right = call.arg(0), call.arg(1)
    for a, b, out in _product_ways(call, left, right, 1 if call.name == "bmm" else 0):
        if left is right:
            continue  # one node has one placement
        if _is_worth_it(call, [left, right], [a, b]):
            yield Candidate({left: a, right: b}, out)


@rule("addmm", "baddbmm")
def product_plus(call: Call) -> Iterator[Candidate]:
    """``beta * bias + alpha * left @ right``; the bias broadcasts."""
    bias, left, right = call.arg(0), call.arg(1), call.arg(2)
    if len({bias, left, right}) < 3:  # one node has one placement
        return
    ndim = len(call.shape(call.node))
    for a, b, out in _product_ways(call, left, right, 1 if call.name == "baddbmm" else 0):
        if not _is_worth_it(call, [left, right], [a, b]):
            continue
        if isinstance(out, Shard):
            own = out.dim - (ndim - len(call.shape(bias)))  # the bias broadcasts from the last dim
            broadcast = own < 0 or call.shape(bias)[own] == 1
            yield Candidate({bias: R if broadcast else Shard(own), left: a, right: b}, out)
        elif out == SUM and call.placement_of(bias) == R and call.shape(bias) == call.shape(call.node):
            yield Candidate({bias: SUM, left: a, right: b}, out)


# Layers: operator -> positions of the arguments with the batch in dim 0, and for each output "b" (has the batch), "p"
# (partial sum over the batch: a parameter's gradient) or "r" (replicated). All other tensor arguments are replicated.
_LAYERS: dict[str, tuple[tuple[int, ...], str]] = {
    "convolution": ((0,), "b"),
    "convolution_backward": ((0, 1), "bpp"),
    "max_pool2d_with_indices": ((0,), "bb"),
    "max_pool2d_with_indices_backward": ((0, 1, 7), "b"),
    "avg_pool2d": ((0,), "b"),
    "avg_pool2d_backward": ((0, 1), "b"),
    "_adaptive_avg_pool2d": ((0,), "b"),
    "_adaptive_avg_pool2d_backward": ((0, 1), "b"),
    "native_group_norm": ((0,), "bbb"),
    "native_group_norm_backward": ((0, 1, 2, 3), "bpp"),
    "upsample_nearest2d": ((0,), "b"),
    "upsample_bilinear2d": ((0,), "b"),
    "_scaled_dot_product_flash_attention_for_cpu": ((0, 1, 2), "bb"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ((0, 1, 2, 3, 4, 5), "bbb"),
    "_scaled_dot_product_efficient_attention": ((0, 1, 2), "bbrr"),
}


@rule(*_LAYERS)
def layer(call: Call) -> Iterator[Candidate]:
    positions, outputs = _LAYERS[call.name]
    batched = [call.arg(position) for position in positions]
    batched = [node for node in batched if isinstance(node, fx.Node)]
    if len(call.shape(batched[0])) < 3 or not any(dim == 0 for _, dim in call.shards(batched)):  # no batch dim
        return
    inputs: dict[fx.Node, Placement] = {}
    query = call.shape(batched[0])
    for node in call.tensors():
        carries = node in batched
        if call.name.startswith("_scaled_dot_product"):  # a mask with the query's dims, unless it broadcasts
            carries = carries or (len(call.shape(node)) == len(query) and call.shape(node)[0] == query[0])
        inputs[node] = Shard(0) if carries else R
    states = tuple({"b": Shard(0), "p": SUM, "r": R}[kind] for kind in outputs)
    value = call.node.meta.get("val")
    yield Candidate(inputs, states if isinstance(value, tuple | list) else states[0])


# The same for operators with any number of leading batch dims: the first argument named has all of them, and beside it
# its last dims, which are not the batch, as many as the shape in the argument of the last position.
_LEADING: dict[str, tuple[tuple[int, ...], str, int | None]] = {
    "native_layer_norm": ((0,), "bbb", 1),
    "native_layer_norm_backward": ((1, 0, 3, 4), "bpp", 2),  # gradients of weight and bias are partial
    "embedding": ((1,), "b", None),
    "embedding_dense_backward": ((1, 0), "p", None),
}


@rule(*_LEADING)
def leading(call: Call) -> Iterator[Candidate]:
    positions, outputs, shape_at = _LEADING[call.name]
    batched = [call.arg(position) for position in positions]
    num_batch_dims = len(call.shape(batched[0])) - (0 if shape_at is None else len(call.arg(shape_at)))
    if call.name == "embedding_dense_backward" and call.arg(4, False):
        return  # scales by counts over all rows
    for dim in dict.fromkeys(dim for _, dim in call.shards(batched[:2])):
        if dim < num_batch_dims:
            states = tuple({"b": Shard(dim), "p": SUM}[kind] for kind in outputs)
            yield Candidate(dict.fromkeys(batched, Shard(dim)), states if len(states) > 1 else states[0])


@rule("nll_loss_forward")
def nll_loss(call: Call) -> Iterator[Candidate]:
    """Row losses and their sums; decompositions have replaced a mean before."""
    scores, target, weight, reduction = (call.arg(i) for i in range(4))
    if len(call.shape(scores)) != 2 or reduction == 1:
        return
    inputs: dict[fx.Node, Placement] = {scores: Shard(0), target: Shard(0)}
    if isinstance(weight, fx.Node):
        inputs[weight] = R
    out: OutputPlacement = (Shard(0), R) if reduction == 0 else (SUM, SUM)
    if any(dim == 0 for _, dim in call.shards([scores, target])):
        yield Candidate(inputs, out)


# Reductions: over a sharded dim to a partial value, otherwise to a smaller shard.
_REDUCTIONS = {"sum": "sum", "mean": "avg", "amax": "max", "amin": "min"}


@rule("sum", "mean", "amax", "amin")
def reduce_dims(call: Call) -> Iterator[Candidate]:
    """``sum``/``mean``/``amax``/``amin`` over some or all dims."""
    source = call.arg(0)
    assert isinstance(source, fx.Node)
    kind = _REDUCTIONS[call.name]
    placement = call.placement_of(source)
    linear = isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg") and call.name in ("sum", "mean")
    linear = linear and is_linear_dtype(call)
    if linear and (call.may_stay_partial or source not in call.desired):
        yield Candidate({source: placement}, placement)
    dims = call.arg(1) if len(call.node.args) > 1 or "dim" in call.node.kwargs else None
    ndim = len(call.shape(source))
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {d % ndim for d in dims} if dims else set(range(ndim))
    for _, dim in call.shards([source]):
        if dim not in reduced:
            out = dim if call.arg(2, False) else dim - sum(1 for d in reduced if d < dim)
            yield Candidate({source: Shard(dim)}, Shard(out))
        elif kind in ("max", "min") and call.leaves_a_rank_empty(source, dim):
            continue  # no maximum of nothing
        elif call.rounds and kind in ("sum", "avg"):
            continue
        elif kind != "avg" or call.splits(source, dim):  # unequal chunks: unequal weights
            yield Candidate({source: Shard(dim)}, Partial(kind))


@rule("linalg_vector_norm")
def vector_norm(call: Call) -> Iterator[Candidate]:
    """Partial norms: of a shard, or of partial norms of the same order."""
    source = call.arg(0)
    order = float(call.arg(1, 2.0))
    dims = call.arg(2)
    if dims not in (None, []) or order == 0:
        return
    yield from norm_ways(call, source, order)


def norm_ways(call: Call, source: fx.Node, order: float) -> Iterator[Candidate]:
    # The reduction of the shards' p-norms to the full one. In half precision `Inserter` computes them in float32, and
    # rounds once they are reduced: a norm of norms, as in clipping, is then one of rounded norms, as on one device.
    partial: Placement = Partial("max" if order == math.inf else "min" if order == -math.inf else f"norm{order}")
    if call.placement_of(source) == partial and not call.is_half:
        yield Candidate({source: partial}, partial)
    for _, dim in call.shards([source]):
        # The norm of nothing is 0, but it has no maximum or minimum: the kernel would raise on one rank.
        if not math.isinf(order) or not call.leaves_a_rank_empty(source, dim):
            yield Candidate({source: Shard(dim)}, partial)


@rule("_foreach_norm")
def foreach_norm(call: Call) -> Iterator[Candidate]:
    order = float(call.arg(1, 2.0))
    inputs: dict[fx.Node, Placement] = {}
    outputs: list[OutputPlacement] = []
    for node in call.arg(0):
        best = next(norm_ways(call, node, order), None)
        inputs[node] = best.inputs[node] if best else R
        outputs.append(best.output if best else R)
    yield Candidate(inputs, tuple(outputs))


@rule("stack")
def stack_scalars(call: Call) -> Iterator[Candidate]:
    """Stacks keep the members' common shard (its dim moves up) or kind of partial value."""
    nodes = call.tensors()
    position = int(call.arg(1, 0))
    position += (len(call.shape(nodes[0])) + 1) if position < 0 else 0  # the result has one dim more
    for kind in dict.fromkeys(call.placement_of(node) for node in nodes):
        if isinstance(kind, Partial):
            yield Candidate(dict.fromkeys(nodes, kind), kind)
        if isinstance(kind, Shard):
            yield Candidate(dict.fromkeys(nodes, kind), Shard(kind.dim + (1 if position <= kind.dim else 0)))


_ALONG = (
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "sort", "topk", "cumsum",
    "gather", "scatter", "scatter_add",
)  # fmt: skip


@rule(*_ALONG)
def along(call: Call) -> Iterator[Candidate]:
    """Shard every dim but the one that the operator works along."""
    ndim = len(call.shape(call.arg(0)))
    touched = call.named("dim", -1) % max(ndim, 1)
    nodes = call.tensors()
    if any(len(call.shape(node)) != ndim for node in nodes):
        return
    for dim in dict.fromkeys(d for _, d in call.shards(nodes)):
        # Gather and scatter may use fewer rows of one operand than of another; then rows do not correspond.
        if dim != touched and len({call.shape(node)[dim] for node in nodes}) == 1:
            yield Candidate(dict.fromkeys(nodes, Shard(dim)), call.outputs(Shard(dim)))


# Elementwise operators, alone and over lists (`_foreach_*`, `_fused_*`), with broadcasting.
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
    ndim = next((value.ndim for value in tensors_of(call.node)), 0)
    for inputs, placement in operand_ways(call, call.name, call.tensors(), ndim):
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
        if name in KEEPS_NORMS and len(operands) == 1 and not (name == "_to_copy" and call.is_half):
            yield {partial[0]: kind}, kind
        return
    base = name.removeprefix("_foreach_")
    if call.named("rounding_mode") is not None:
        return  # rounding is not linear
    others_equal = all(call.placement_of(node) == R for node in operands if node is not partial[0])
    divides = base == "div" and partial[0] not in nodes_in(call.arg(0))
    # Linear in one argument, not in one node: in `s * s` the squares of partial values are not partial squares.
    uses = sum(node is partial[0] for _, value in arguments(call.node) for node in nodes_in(value))
    if len(partial) == 1 and uses == 1 and base in LINEAR_IN_ONE and others_equal and not divides:
        yield {node: (kind if node is partial[0] else R) for node in operands}, kind
    if base in LINEAR_IN_ALL and len(operands) > 1 and all(call.placement_of(node) == kind for node in operands):
        yield dict.fromkeys(operands, kind), kind


def is_linear_dtype(call: Call) -> bool:
    """Return True if the output keeps fractions. A sum of rounded parts is not the rounded sum."""
    return all(value.is_floating_point() or value.is_complex() for value in tensors_of(call.node))


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
    return isinstance(value, fx.Node) and is_tensor(value)


# Operators that rearrange elements: a sharded dim gets a new number, or none.
def follow_dim(before: Sequence[int], after: Sequence[int], dim: int, world: int) -> int | None:
    """Return the dim of ``after`` with the same chunks as ``before`` along ``dim``, if any.

    The number of elements before the dim must be the same, and the world size must divide both dims: then rank r's
    shard has the same elements in either shape.
    """
    if before[dim] % world or before[dim] == 0:
        return None
    outer = math.prod(before[:dim])  # a chunk of the dim repeats so often
    for candidate, size in enumerate(after):
        if math.prod(after[:candidate]) == outer and size > 1 and size % world == 0:
            return candidate
    return None


Follow = Callable[[Call, int], int | None]
"""Dim at which a shard of a dim of the first argument lies afterwards; None: it cannot stay a shard."""


def follows(*names: str) -> Callable[[Follow], Follow]:
    """Register a rule for shards of the first argument. Rearranging commutes with every reduction over ranks."""

    def enter(follow: Follow) -> Follow:
        def candidates(call: Call) -> Iterator[Candidate]:
            source = call.arg(0)
            kind = call.placement_of(source)
            if isinstance(kind, Partial) and (call.may_stay_partial or source not in call.desired):
                yield Candidate({source: kind}, call.outputs(kind))
            for _, dim in call.shards([source]):
                after = follow(call, dim)
                if after is not None:
                    yield Candidate({source: Shard(dim)}, call.outputs(Shard(after)))

        rule(*names)(candidates)
        return follow

    return enter


def _source_ndim(call: Call) -> int:
    return len(call.shape(call.arg(0)))


@follows("view", "_unsafe_view")
def view(call: Call, dim: int) -> int | None:
    return follow_dim(call.shape(call.arg(0)), call.shape(call.node), dim, call.world)


@follows("expand")
def expand(call: Call, dim: int) -> int | None:
    after = dim + len(call.shape(call.node)) - _source_ndim(call)  # new dims come first
    return after if call.shape(call.arg(0))[dim] == call.shape(call.node)[after] else None


@follows("permute")
def permute(call: Call, dim: int) -> int:
    return [d % _source_ndim(call) for d in call.arg(1)].index(dim)


@follows("transpose", "t")
def transpose(call: Call, dim: int) -> int:
    ndim = _source_ndim(call)
    item, other = (int(call.arg(1)) % ndim, int(call.arg(2)) % ndim) if call.name == "transpose" else (0, 1)
    return {item: other, other: item}.get(dim, dim) if ndim > 1 else dim


@follows("unsqueeze")
def unsqueeze(call: Call, dim: int) -> int:
    return dim + 1 if int(call.arg(1)) % len(call.shape(call.node)) <= dim else dim


@follows("squeeze")
def squeeze(call: Call, dim: int) -> int | None:
    shape = call.shape(call.arg(0))
    asked = call.arg(1)  # None in the overload that drops every dim of size one
    dims = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    removed = {d % len(shape) for d in dims if shape and shape[d % len(shape)] == 1}
    return None if dim in removed else dim - sum(1 for d in removed if d < dim)


@follows("slice")
def slice_(call: Call, dim: int) -> int | None:
    if dim != int(call.arg(1, 0)) % max(_source_ndim(call), 1):
        return dim
    start, end, step = call.arg(2), call.arg(3), call.arg(4, 1)
    full = start in (None, 0) and isinstance(end, int | None) and step == 1  # a slice of everything
    return dim if full and (end is None or end > 1 << 60) else None


@follows("select", "unbind")
def without_dim(call: Call, dim: int) -> int | None:
    touched = int(call.arg(1, 0)) % max(_source_ndim(call), 1)
    return None if dim == touched else dim - 1 if touched < dim else dim


@follows("split", "split_with_sizes")
def split(call: Call, dim: int) -> int | None:
    return None if dim == int(call.arg(2, 0)) % max(_source_ndim(call), 1) else dim


@follows("slice_backward", "select_backward")
def scatter_into_zeros(call: Call, dim: int) -> int | None:
    """Gradient of ``slice``/``select``: zeros of the input's shape around the values."""
    touched = int(call.arg(2))  # dim of the slice or selection
    after = dim + 1 if call.name == "select_backward" and dim >= touched else dim
    return None if after == touched else after


@rule("cat")
def cat(call: Call) -> Iterator[Candidate]:
    nodes = call.tensors(call.arg(0))
    touched = int(call.arg(1, 0)) % max(len(call.shape(call.node)), 1)
    kinds = {call.placement_of(node) for node in nodes}
    if len(kinds) == 1 and isinstance(call.placement_of(nodes[0]), Partial) and call.may_stay_partial:
        yield Candidate(dict.fromkeys(nodes, call.placement_of(nodes[0])), call.placement_of(nodes[0]))
    for _, dim in call.shards(nodes):
        if dim != touched and all(len(call.shape(node)) == len(call.shape(call.node)) for node in nodes):
            yield Candidate(dict.fromkeys(nodes, Shard(dim)), Shard(dim))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new_tensor(call: Call) -> Iterator[Candidate]:
    """Constants of a given shape need no data: they are replicated."""
    source: Any = call.arg(0)
    yield Candidate({source: call.placement_of(source)}, R)


def find_rule(node: fx.Node) -> Rule | None:
    """Return the rule of a call, by name or family (lists of tensors, elementwise operators)."""
    name = base_name(node)
    if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        return pointwise
    if name in RULES:
        return RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return foreach
    return pointwise if name in EXTRA_POINTWISE else None
