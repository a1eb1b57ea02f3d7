"""Operators that rearrange elements: a sharded dim gets a new number, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Shard

from dp_partition.sharding.op_rules.table import Call, Candidate, R, rule


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


def _ndim(call: Call) -> int:
    return len(call.shape(call.arg(0)))


@follows("view", "_unsafe_view")
def view(call: Call, dim: int) -> int | None:
    return follow_dim(call.shape(call.arg(0)), call.shape(call.node), dim, call.world)


@follows("expand")
def expand(call: Call, dim: int) -> int | None:
    after = dim + len(call.shape(call.node)) - _ndim(call)  # new dims come first
    return after if call.shape(call.arg(0))[dim] == call.shape(call.node)[after] else None


@follows("permute")
def permute(call: Call, dim: int) -> int:
    return [d % _ndim(call) for d in call.arg(1)].index(dim)


@follows("transpose", "t")
def transpose(call: Call, dim: int) -> int:
    ndim = _ndim(call)
    one, other = (int(call.arg(1)) % ndim, int(call.arg(2)) % ndim) if call.name == "transpose" else (0, 1)
    return {one: other, other: one}.get(dim, dim) if ndim > 1 else dim


@follows("unsqueeze")
def unsqueeze(call: Call, dim: int) -> int:
    return dim + 1 if int(call.arg(1)) % len(call.shape(call.node)) <= dim else dim


@follows("squeeze")
def squeeze(call: Call, dim: int) -> int | None:
    shape = call.shape(call.arg(0))
    asked = call.arg(1)  # None in the overload that drops every dim of size one
    dims = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {d % len(shape) for d in dims if shape and shape[d % len(shape)] == 1}
    return None if dim in gone else dim - sum(1 for d in gone if d < dim)


@follows("slice")
def slice_(call: Call, dim: int) -> int | None:
    if dim != int(call.arg(1, 0)) % max(_ndim(call), 1):
        return dim
    start, end, step = call.arg(2), call.arg(3), call.arg(4, 1)
    full = start in (None, 0) and isinstance(end, int | None) and step == 1  # a slice of everything
    return dim if full and (end is None or end > 1 << 60) else None


@follows("select", "unbind")
def without_dim(call: Call, dim: int) -> int | None:
    touched = int(call.arg(1, 0)) % max(_ndim(call), 1)
    return None if dim == touched else dim - 1 if touched < dim else dim


@follows("split", "split_with_sizes")
def split(call: Call, dim: int) -> int | None:
    return None if dim == int(call.arg(2, 0)) % max(_ndim(call), 1) else dim


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
