"""Operators that rearrange elements: each dim of a shard either survives under a new number or the call is not
sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Shard

from dp_partition.sharding.op_rules.table import Call, Candidate, R, rule


def follow_dim(before: Sequence[int], after: Sequence[int], dim: int, world: int) -> int | None:
    """The dim of ``after`` whose equal chunks are the chunks of ``before`` along ``dim``, if there is one.

    Elements before the dim must be the same in number, and the world size must divide both dims: then rank r's part
    is the same elements in either shape.
    """
    if before[dim] % world or before[dim] == 0:
        return None
    outer = _product(before[:dim])
    for candidate, size in enumerate(after):
        if _product(after[:candidate]) == outer and size > 1 and size % world == 0:
            return candidate
    return None


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _partial(call: Call, source: fx.Node) -> Iterator[Candidate]:
    """Rearranging commutes with every reduction over ranks."""
    kind = call.placement_of(source)
    if isinstance(kind, Partial) and (call.may_stay_partial or source not in call.desired):
        value = call.node.meta.get("val")
        yield Candidate({source: kind}, tuple(kind for _ in value) if isinstance(value, tuple | list) else kind)


@rule("view", "_unsafe_view")
def view(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    yield from _partial(call, source)
    for _, dim in call.shards([source]):
        target = follow_dim(call.shape(source), call.shape(call.node), dim, call.world)
        if target is not None:
            yield Candidate({source: Shard(dim)}, Shard(target))


@rule("expand")
def expand(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    yield from _partial(call, source)
    added = len(call.shape(call.node)) - len(call.shape(source))
    for _, dim in call.shards([source]):
        if call.shape(source)[dim] == call.shape(call.node)[dim + added]:
            yield Candidate({source: Shard(dim)}, Shard(dim + added))


@rule("permute")
def permute(call: Call) -> Iterator[Candidate]:
    source, order = call.arg(0), call.arg(1)
    yield from _partial(call, source)
    ndim = len(call.shape(source))
    for _, dim in call.shards([source]):
        yield Candidate({source: Shard(dim)}, Shard([d % ndim for d in order].index(dim)))


@rule("transpose", "t")
def transpose(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    yield from _partial(call, source)
    ndim = len(call.shape(source))
    one, other = (int(call.arg(1)) % ndim, int(call.arg(2)) % ndim) if call.name == "transpose" else (0, 1)
    swapped = {one: other, other: one} if ndim > 1 else {}
    for _, dim in call.shards([source]):
        yield Candidate({source: Shard(dim)}, Shard(swapped.get(dim, dim)))


@rule("unsqueeze")
def unsqueeze(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    yield from _partial(call, source)
    position = int(call.arg(1)) % len(call.shape(call.node))
    for _, dim in call.shards([source]):
        yield Candidate({source: Shard(dim)}, Shard(dim + 1 if position <= dim else dim))


@rule("squeeze")
def squeeze(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    yield from _partial(call, source)
    shape = call.shape(source)
    given = call.arg(1)  # no argument at all in the overload that drops every dim of size one
    dims = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = {d % len(shape) for d in dims if shape and shape[d % len(shape)] == 1}
    for _, dim in call.shards([source]):
        if dim not in gone:
            yield Candidate({source: Shard(dim)}, Shard(dim - sum(1 for d in gone if d < dim)))


def _other_dim(
    call: Call, source: fx.Node, touched: int, *, drops: bool = False, many: bool = False
) -> Iterator[Candidate]:
    """The call works along one dim; shards of other dims pass."""
    yield from _partial(call, source)
    touched %= max(len(call.shape(source)), 1)
    value = call.node.meta.get("val")
    for _, dim in call.shards([source]):
        if dim != touched:
            out = Shard(dim - 1 if drops and touched < dim else dim)
            yield Candidate({source: Shard(dim)}, tuple(out for _ in value) if many and value is not None else out)


@rule("slice")
def slice_(call: Call) -> Iterator[Candidate]:
    source, dim = call.arg(0), int(call.arg(1, 0))
    yield from _other_dim(call, source, dim)
    start, end, step = call.arg(2), call.arg(3), call.arg(4, 1)
    size = call.shape(source)[dim]
    full = start in (None, 0) and isinstance(end, int | None) and (end is None or end >= size) and step == 1
    if full and (end is None or end > 1 << 60):
        for _, sharded in call.shards([source]):
            if sharded == dim:
                yield Candidate({source: Shard(dim)}, Shard(dim))


@rule("select")
def select(call: Call) -> Iterator[Candidate]:
    yield from _other_dim(call, call.arg(0), int(call.arg(1)), drops=True)


@rule("split", "split_with_sizes", "unbind")
def split(call: Call) -> Iterator[Candidate]:
    position = 1 if call.name == "unbind" else 2
    yield from _other_dim(call, call.arg(0), int(call.arg(position, 0)), drops=call.name == "unbind", many=True)


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


@rule("slice_backward", "select_backward")
def scatter_into_zeros(call: Call) -> Iterator[Candidate]:
    """The gradient of ``slice``/``select``: zeros of the input's shape around the values."""
    source, dim = call.arg(0), int(call.arg(2))
    drops = call.name == "select_backward"
    yield from _partial(call, source)
    for _, sharded in call.shards([source]):
        out = sharded + 1 if drops and sharded >= dim else sharded
        if out != dim:
            yield Candidate({source: Shard(sharded)}, Shard(out))


@rule("constant_pad_nd")
def pad(call: Call) -> Iterator[Candidate]:
    source, amounts = call.arg(0), list(call.arg(1))
    ndim = len(call.shape(source))
    padded = {ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    for _, dim in call.shards([source]):
        if dim not in padded:
            yield Candidate({source: Shard(dim)}, Shard(dim))


@rule("repeat")
def repeat(call: Call) -> Iterator[Candidate]:
    source, times = call.arg(0), list(call.arg(1))
    added = len(times) - len(call.shape(source))
    for _, dim in call.shards([source]):
        if times[dim + added] == 1:
            yield Candidate({source: Shard(dim)}, Shard(dim + added))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new_tensor(call: Call) -> Iterator[Candidate]:
    """Constants of a given shape need no data: they are replicated."""
    source: Any = call.arg(0)
    yield Candidate({source: call.placement_of(source)}, R)
