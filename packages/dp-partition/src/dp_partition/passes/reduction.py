"""Reduction of a flat buffer of gradients: its dtype and the mesh axes.

Written as generators: code up to a ``yield`` sends, code after it needs the result. `bucketing` puts each
stage into the graph.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import fx

from dp_partition._torch_compat import collectives
from dp_partition.ops import aten
from dp_partition.passes.moves import Mover

StagedEmission = Generator[None, None, fx.Node]


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer of gradients.

    Attributes:
        node: The buffer.
        numel: Number of its elements.
        like: A tensor of its dtype and device.
        op: ``"avg"`` (local semantics) or ``"sum"``.
        scatter: Each rank keeps its shard of the result instead of all of it.
    """

    node: fx.Node
    numel: int
    like: torch.Tensor
    op: str
    scatter: bool


def reduce_flat(mover: Mover, flat: FlatBuffer, dtype: torch.dtype | None) -> StagedEmission:
    """Reduce the buffer, in full or to this rank's shard; the result has the buffer's dtype.

    With ``dtype`` the buffer is cast before it is sent and cast back afterwards.
    """
    cast = dtype is not None and dtype != flat.like.dtype
    averaged, op, node = flat.op == "avg", flat.op, flat.node
    before, after = 1.0, 1.0
    if cast:
        node = mover.call(aten._to_copy.default, node, dtype=dtype)
        # A float16 sum is divided before and after, each near the root of the number of ranks, as FSDP does: neither
        # the sum nor the sent buffer leaves the dtype's range. Other dtypes use the collective's average.
        if averaged and dtype is torch.float16:
            op, (before, after) = "sum", division(mover.world * mover.replicas)
    node = _divided(mover, node, before)
    if flat.scatter:
        work = mover.issue(collectives.reduce_scatter_tensor.default, node, op, mover.world, mover.group)
    else:
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.group)
    yield
    node = mover.wait(work)
    if averaged and mover.replica_group:  # second: a shard is smaller to send
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.replica_group, ranks=mover.replicas)
        yield
        node = mover.wait(work)
    node = _divided(mover, node, after)
    return mover.call(aten._to_copy.default, node, dtype=flat.like.dtype) if cast else node


def division(ranks: int) -> tuple[float, float]:
    """Return the divisors before and after a sum over ``ranks``: a power of two near the root, and the rest."""
    before = 1.0
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


def _divided(mover: Mover, node: fx.Node, by: float) -> fx.Node:
    return node if by == 1 else mover.call(aten.div.Scalar, node, by)
