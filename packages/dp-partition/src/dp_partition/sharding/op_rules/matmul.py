"""Matrix products: rows follow the left operand, columns the right; sharded contractions leave partial sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

from dp_partition.capture.node_meta import meta_of
from dp_partition.sharding.op_rules.table import SUM, Call, Candidate, R, rule


def _ways(call: Call, left: fx.Node, right: fx.Node, batched: int) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield ``(left, right, output)`` placements of a product with ``batched`` leading batch dims."""
    rows, inner, columns = batched, batched + 1, batched + 1
    # An optimizer that multiplies in half precision keeps sums full: Muon's iteration amplifies each rounding.
    value = call.node.meta.get("val")
    in_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    rounds = in_half and meta_of(call.node).get("phase") == "optimizer"
    for dim in range(batched):  # independent products
        yield Shard(dim), Shard(dim), Shard(dim)
    yield Shard(rows), R, Shard(rows)
    yield R, Shard(columns), Shard(columns)
    if call.splits(left, inner) and not rounds:
        yield Shard(inner), Shard(batched), SUM
    for kind in (call.placement_of(left), call.placement_of(right)):
        if isinstance(kind, Partial) and kind.reduce_op in ("sum", "avg"):
            yield kind, R, kind
            yield R, kind, kind


def _worth(call: Call, nodes: list[fx.Node], wanted: list[Placement]) -> bool:
    """Return True for strategies with an existing shard or partial value. New splits save no bytes."""
    return any(
        call.placement_of(node) == placement and placement != R for node, placement in zip(nodes, wanted, strict=True)
    )


@rule("mm", "bmm")
def product(call: Call) -> Iterator[Candidate]:
    left, right = call.arg(0), call.arg(1)
    for a, b, out in _ways(call, left, right, 1 if call.name == "bmm" else 0):
        if left is right:
            continue  # one node has one placement
        if _worth(call, [left, right], [a, b]):
            yield Candidate({left: a, right: b}, out)


@rule("addmm", "baddbmm")
def product_plus(call: Call) -> Iterator[Candidate]:
    """``beta * bias + alpha * left @ right``; the bias broadcasts."""
    bias, left, right = call.arg(0), call.arg(1), call.arg(2)
    if len({bias, left, right}) < 3:  # one node has one placement
        return
    ndim = len(call.shape(call.node))
    for a, b, out in _ways(call, left, right, 1 if call.name == "baddbmm" else 0):
        if not _worth(call, [left, right], [a, b]):
            continue
        if isinstance(out, Shard):
            own = out.dim - (ndim - len(call.shape(bias)))  # the bias broadcasts from the last dim
            broadcast = own < 0 or call.shape(bias)[own] == 1
            yield Candidate({bias: R if broadcast else Shard(own), left: a, right: b}, out)
        elif out == SUM and call.placement_of(bias) == R and call.shape(bias) == call.shape(call.node):
            yield Candidate({bias: SUM, left: a, right: b}, out)
