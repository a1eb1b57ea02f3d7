"""Reductions: over a sharded dim to a partial value, otherwise to a smaller shard."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

from dp_partition.sharding.op_rules.pointwise import is_linear_dtype
from dp_partition.sharding.op_rules.table import Call, Candidate, OutputPlacement, R, rule

_KINDS = {
    "sum": "sum",
    "mean": "avg",
    "amax": "max",
    "amin": "min",
    "max": "max",
    "min": "min",
    "any": "max",
    "all": "min",
}


@rule("sum", "mean", "amax", "amin")
def reduce_dims(call: Call) -> Iterator[Candidate]:
    """``sum``/``mean``/``amax``/``amin`` over some or all dims."""
    source = call.arg(0)
    assert isinstance(source, fx.Node)
    kind = _KINDS[call.name]
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
    # The reduction of the shards' p-norms to the full one.
    partial: Placement = Partial("max" if order == math.inf else "min" if order == -math.inf else f"norm{order}")
    if call.placement_of(source) == partial:
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
