"""Flat buffers: gradients packed for one collective and unpacked again, parameters likewise.

Layout: members one after the other, each as ``[world, chunk]`` where a collective cuts along dim 0. Written as
generators: what comes up to a ``yield`` is sent, what comes after it is needed later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Generator

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from dp_partition._torch_compat import collectives
from dp_partition.collectives import Move, Mover, chunk_bounds
from dp_partition.in_bucket import mark_packing
from dp_partition.ops import aten
from dp_partition.reducing import CommHook, Flat, reduce_flat

Parts = Generator[None, None, list[fx.Node]]


def reduced(mover: Mover, moves: list[Move], dtype: torch.dtype | None, hook: CommHook | None) -> Parts:
    """Gradients of one bucket, averaged or summed over the ranks: whole, or this rank's shards."""
    kind = moves[0].origin
    assert isinstance(kind, Partial)
    if isinstance(moves[0].wanted, Replicate):
        return _all_reduced(mover, moves, kind, dtype, hook)
    return _scattered(mover, moves, kind, dtype, hook)


def _all_reduced(
    mover: Mover, moves: list[Move], kind: Partial, dtype: torch.dtype | None, hook: CommHook | None
) -> Parts:
    like, sizes = moves[0].like, [math.prod(m.shape) for m in moves]
    node = mover.call(aten.cat.default, [_flat(mover, m.start, m.shape) for m in moves])
    mark_packing(node, sizes, like)
    flat = Flat(node, sum(sizes), like, kind.reduce_op, scatter=False)
    whole = yield from reduce_flat(mover, flat, dtype, hook)
    pieces = mover.call(aten.split_with_sizes.default, whole, sizes)
    return [_view(mover, _item(mover, pieces, i), m.shape) for i, m in enumerate(moves)]


def _scattered(
    mover: Mover, moves: list[Move], kind: Partial, dtype: torch.dtype | None, hook: CommHook | None
) -> Parts:
    if len(moves) == 1 and hook is None:  # it is sent as it is; a hook may write what it is given
        rows = mover.pad(moves[0].start, moves[0].shape[0])
    else:
        rows = _chunks(mover, moves)
    node = mover.call(aten.reshape.default, rows, [-1])
    chunks, sizes = _chunks_of(mover.world, moves)
    flat = Flat(node, mover.world * sum(sizes), moves[0].like, kind.reduce_op, scatter=True)
    shard = yield from reduce_flat(mover, flat, dtype, hook)
    pieces = mover.call(aten.split_with_sizes.default, shard, sizes)
    views = [
        _view(mover, _item(mover, pieces, i), (chunk, *m.shape[1:]))
        for i, (chunk, m) in enumerate(zip(chunks, moves, strict=True))
    ]
    return [mover.unpad(view, m.shape[0]) for view, m in zip(views, moves, strict=True)]


def _chunks_of(world: int, moves: list[Move]) -> tuple[list[int], list[int]]:
    """How many rows of each tensor a rank has, padding included, and how many elements those are."""
    chunks = [-(-m.shape[0] // world) for m in moves]
    return chunks, [chunk * math.prod(m.shape[1:]) for chunk, m in zip(chunks, moves, strict=True)]


def gathered(mover: Mover, moves: list[Move]) -> Parts:
    """Parameters of one bucket, whole, from every rank's shards."""
    world = mover.world
    chunks, sizes = _chunks_of(world, moves)
    flats = []
    for chunk, m in zip(chunks, moves, strict=True):
        start, end = chunk_bounds(m.shape[0], world, mover.rank)
        local = _flat(mover, m.start, m.shape)
        missing = (chunk - (end - start)) * math.prod(m.shape[1:])
        flats.append(mover.call(aten.constant_pad_nd.default, local, [0, missing]) if missing else local)
    alone = len(flats) == 1
    flat = mover.call(aten.contiguous.default, flats[0]) if alone else mover.call(aten.cat.default, flats)
    work = mover.issue(collectives.all_gather_into_tensor.default, flat, world, mover.group)
    yield
    rows = mover.call(aten.view.default, mover.wait(work), [world, -1])
    pieces = mover.call(aten.split_with_sizes.default, rows, sizes, 1)
    results = []
    for i, (chunk, m) in enumerate(zip(chunks, moves, strict=True)):
        whole = mover.call(aten.reshape.default, _item(mover, pieces, i), [world * chunk, *m.shape[1:]])
        padded = chunk * world != m.shape[0]
        results.append(mover.call(aten.slice.Tensor, whole, 0, 0, m.shape[0]) if padded else whole)
    return results


def _chunks(mover: Mover, moves: list[Move]) -> fx.Node:
    """The gradients as ``[world, chunk]``, side by side; one call, where none of them is empty."""
    if all(math.prod(m.shape) for m in moves):
        return mover.call(aten._chunk_cat.default, [m.start for m in moves], 0, mover.world)
    rows = [mover.call(aten.reshape.default, mover.pad(m.start, m.shape[0]), [mover.world, -1]) for m in moves]
    return mover.call(aten.cat.default, rows, 1)


def _flat(mover: Mover, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node if len(shape) == 1 else mover.call(aten.reshape.default, node, [-1])


def _view(mover: Mover, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node if len(shape) == 1 else mover.call(aten.view.default, node, list(shape))


def _item(mover: Mover, node: fx.Node, index: int) -> fx.Node:
    return mover.call(operator.getitem, node, index)


__all__ = ["Parts", "gathered", "reduced"]
