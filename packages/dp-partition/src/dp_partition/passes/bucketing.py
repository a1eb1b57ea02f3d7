"""Bucket and schedule: few large collectives for many small ones, issued early, awaited late.

Gradients are collected in buckets in the order of backward; a bucket is reduced as soon as its last gradient is
there. Parameters are gathered in buckets in the order of first use, ``prefetch`` buckets ahead of
compute. Order and content of buckets depend on the graph alone, so they are the same on every rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from dp_partition._torch_compat import collectives
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.nodes import aten, copy_notes, meta_of, mutated_inputs, root_of
from dp_partition.passes.insert_collectives import Move, Mover
from dp_partition.plan.placements import NodeType, chunk_bounds
from dp_partition.plan.plan import CommConfig
from dp_partition.sharding.propagate import is_gradient


@dataclass
class _Bucket:
    """Moves of one collective."""

    moves: list[Move]
    ready: int  # from here on every start holds its final value
    needed: int  # position of the first use of a result


def bucket_and_schedule(graph: fx.Graph, moves: list[Move], mover: Mover, comm: CommConfig) -> None:
    """Replace the single moves of parameters and gradients by buckets, in place.

    With ``bucket_bytes`` 0 each gradient has a bucket of its own, and parameters are gathered one by one.
    """
    positions = {node: index for index, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)  # the order before insertions
    live = [move for move in moves if move.result.users and move.start in positions]  # others are unused or erased
    gathers = [m for m in live if _is_gather(m) and comm.bucket_bytes > 0]
    # Averages and sums of gradients; those without dims only if they are a parameter's own.
    reductions = [m for m in live if isinstance(m.origin, Partial) and m.origin.reduce_op in ("sum", "avg")]
    reductions = [m for m in reductions if m.node_type is NodeType.GRAD and m.wanted in (Replicate(), Shard(0))]
    reductions = [m for m in reductions if len(m.shape) > 0 or is_gradient(m.start)]
    timing = _Timing(nodes, positions)
    gather_buckets = _group(gathers, timing, comm.bucket_bytes, timing.first_use)
    reduce_buckets = _group(reductions, timing, comm.bucket_bytes, timing.ready)
    issues: list[tuple[_Bucket, tuple[int, int, int]]] = []
    phases = [meta_of(node).get("phase") for node in nodes]
    for index, bucket in enumerate(gather_buckets):
        ahead = gather_buckets[max(index - comm.prefetch, 0)]  # sent when this one is needed
        # What backward needs is sent in backward: it would occupy memory earlier.
        earliest = max(bucket.ready + 1, phases.index("backward") if phases[bucket.needed] == "backward" else 0)
        sent = min(max(ahead.needed, earliest), bucket.needed)  # never after its first use
        issues.append((bucket, (sent, bucket.needed, bucket.needed)))
    for index, bucket in enumerate(reduce_buckets):
        # A sent buffer lives until it is awaited; awaiting it only in the optimizer would keep all gradients full until
        # then. An all-reduced bucket does not get smaller. So where the ``prefetch``-th one after it is sent:
        scattered = [item for item in reduce_buckets[index:] if isinstance(item.moves[0].wanted, Shard)]
        is_awaited_early = bucket in scattered and len(scattered) > max(comm.prefetch, 1)
        awaited = min(bucket.needed, scattered[max(comm.prefetch, 1)].ready + 1) if is_awaited_early else bucket.needed
        issues.append((bucket, (bucket.ready + 1, awaited, bucket.needed)))
    erased: set[fx.Node] = set()  # erased: no places to insert at
    for bucket, places in issues:
        anchors = [next(node for node in nodes[place:] if node not in erased) for place in places]
        _emit(graph, mover, bucket, (anchors[0], anchors[1], anchors[2]), comm, erased)


def _is_gather(move: Move) -> bool:
    kind = move.node_type
    return move.origin == Shard(0) and move.wanted == Replicate() and kind in (NodeType.PARAM, NodeType.STATE)


class _Timing:
    """Last writes and first uses of values, as positions in the graph so far."""

    def __init__(self, nodes: list[fx.Node], positions: dict[fx.Node, int]) -> None:
        self.nodes, self.positions = nodes, positions
        self.last_placeholder = next((i - 1 for i, n in enumerate(nodes) if n.op != "placeholder"), len(nodes) - 1)
        self.writes: dict[fx.Node, list[int]] = {}
        for position, node in enumerate(nodes):
            for written in mutated_inputs(node):
                for written_node in {written, root_of(written)}:
                    self.writes.setdefault(written_node, []).append(position)

    def first_use(self, move: Move) -> int:
        """Return the position of the result's first use."""
        return min(self.positions[user] for user in move.result.users)

    def ready(self, move: Move) -> int:
        """Return the position of the value's last write before the move."""
        start, end = self.positions[move.start], self.positions[move.before]
        roots = {root_of(move.start), move.start}  # a write to either changes the value
        if move.start.target is TAG_GRAD:
            tagged = move.start.args[0]
            assert isinstance(tagged, fx.Node)
            roots |= {tagged, root_of(tagged)}
        writes = [p for root in roots for p in self.writes.get(root, ()) if start < p < end]
        return max(start, self.last_placeholder, *writes) if writes else max(start, self.last_placeholder)


def _group(moves: list[Move], timing: _Timing, limit: int, order: Callable[[Move], int]) -> list[_Bucket]:
    """Fill buckets in order. Each has one dtype and one kind of move, and is ready before it is needed."""
    buckets: list[_Bucket] = []
    open_buckets: dict[Any, _Bucket] = {}
    for move in sorted(moves, key=lambda m: (order(m), timing.positions[m.start])):
        ready, needed = timing.ready(move), timing.first_use(move)
        phase = meta_of(timing.nodes[needed]).get("phase")  # of the first use
        key = (move.like.dtype, str(move.like.device), str(move.origin), str(move.wanted), phase)
        bucket = open_buckets.get(key)
        fits = (
            bucket is not None
            and sum(map(_num_bytes, bucket.moves)) + _num_bytes(move) <= limit
            and max(bucket.ready, ready) < min(bucket.needed, needed)
        )
        if bucket is None or not fits:
            bucket = open_buckets[key] = _Bucket([], ready, needed)
            buckets.append(bucket)
        bucket.moves.append(move)
        bucket.ready, bucket.needed = max(bucket.ready, ready), min(bucket.needed, needed)
    by_need = order == timing.first_use  # gathers; reductions by readiness
    return sorted(buckets, key=lambda b: b.needed if by_need else b.ready)


def _num_bytes(move: Move) -> int:
    return math.prod(move.shape) * move.like.dtype.itemsize


def _emit(
    graph: fx.Graph,
    mover: Mover,
    bucket: _Bucket,
    anchors: tuple[fx.Node, fx.Node, fx.Node],
    comm: CommConfig,
    erased: set[fx.Node],
) -> None:
    """Write a bucket's collective into the graph; its results replace those of the single moves.

    It is sent, awaited and used before the ``anchors``. Erased nodes go into ``erased``: a node inserted before
    one would be missed by the walk back through the graph for the last use of every value.
    """
    old = [move.result for move in bucket.moves]
    gathers = _is_gather(bucket.moves[0])
    parts = gathered(mover, bucket.moves) if gathers else reduced(mover, bucket.moves, comm.reduce_dtype)
    results: list[fx.Node] | None = None
    for place in range(len(anchors) + 1):
        with graph.inserting_before(anchors[min(place, len(anchors) - 1)]):
            try:
                next(parts)
            except StopIteration as end:
                results = end.value
                break
    assert results is not None
    for move, before, after in zip(bucket.moves, old, results, strict=True):
        copy_notes(before, after, "node_type", "phase")
        before.replace_all_uses_with(after)
        while before is not move.start and not before.users:  # the single move
            previous = before.all_input_nodes[0]
            graph.erase_node(before)
            erased.add(before)
            before = previous


StagedEmission = Generator[None, None, list[fx.Node]]


def reduced(mover: Mover, moves: list[Move], dtype: torch.dtype | None) -> StagedEmission:
    """Reduce a bucket's gradients over the ranks: to full ones, or to shards."""
    kind = moves[0].origin
    assert isinstance(kind, Partial)
    if isinstance(moves[0].wanted, Replicate):
        flat = mover.call(aten.cat.default, [_flat(mover, m.start, m.shape) for m in moves])
        full = yield from _reduced_flat(mover, flat, moves[0].like, kind.reduce_op, dtype, scatter=False)
        pieces = mover.call(aten.split_with_sizes.default, full, [math.prod(m.shape) for m in moves])
        return [_view(mover, _item(mover, pieces, i), m.shape) for i, m in enumerate(moves)]
    if len(moves) == 1:  # sent without a copy
        rows = mover.pad(moves[0].start, moves[0].shape[0])
    elif all(math.prod(m.shape) for m in moves):  # ``[world, chunk]``, side by side, in one call
        rows = mover.call(aten._chunk_cat.default, [m.start for m in moves], 0, mover.world)
    else:
        padded = [mover.pad(m.start, m.shape[0]) for m in moves]
        rows = mover.call(aten.cat.default, [mover.call(aten.reshape.default, p, [mover.world, -1]) for p in padded], 1)
    flat = mover.call(aten.reshape.default, rows, [-1])
    chunks, sizes = _chunks_of(mover.world, moves)
    shard = yield from _reduced_flat(mover, flat, moves[0].like, kind.reduce_op, dtype, scatter=True)
    pieces = mover.call(aten.split_with_sizes.default, shard, sizes)
    views = [
        _view(mover, _item(mover, pieces, i), (chunk, *m.shape[1:]))
        for i, (chunk, m) in enumerate(zip(chunks, moves, strict=True))
    ]
    return [mover.unpad(view, m.shape[0]) for view, m in zip(views, moves, strict=True)]


def _reduced_flat(
    mover: Mover, node: fx.Node, like: torch.Tensor, op: str, dtype: torch.dtype | None, *, scatter: bool
) -> Generator[None, None, fx.Node]:
    """Reduce a flat buffer, in full or to this rank's shard. In ``dtype`` if given, with the buffer's own again after.

    Code up to a ``yield`` sends, code after it needs the result.
    """
    is_mean, sent, after = op == "avg", dtype or like.dtype, 1.0
    if sent != like.dtype:
        node = mover.call(aten._to_copy.default, node, dtype=sent)
    if is_mean and sent is torch.float16:  # in other dtypes the collective averages
        op, (before, after) = "sum", divisors(sent, mover.world * mover.replicas)
        node = mover.call(aten.div.Scalar, node, before)
    if scatter:
        work = mover.issue(collectives.reduce_scatter_tensor.default, node, op, mover.world, mover.group)
    else:
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.group)
    yield
    node = mover.wait(work)
    if is_mean and mover.replica_group:  # second: a shard is smaller to send
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.replica_group, ranks=mover.replicas)
        yield
        node = mover.wait(work)
    node = node if after == 1 else mover.call(aten.div.Scalar, node, after)
    return node if sent == like.dtype else mover.call(aten._to_copy.default, node, dtype=like.dtype)


def divisors(dtype: torch.dtype, ranks: int) -> tuple[float, float]:
    """Return the divisors before and after the sum of a mean of gradients: in graphs, in the reducer, in references.

    A sum in float16 is divided by a power of two near the root of the number of ranks, and by the rest behind it, as
    FSDP2 does: neither the sum nor the sent buffer leaves the range of the dtype. A gradient of 1e-5 loses a bit when
    it is divided, and Muon makes 1 % of the movement of that bit: so all averages divide alike.
    """
    if dtype is not torch.float16:
        return float(ranks), 1.0  # before the sum, as DDP does
    before = 1.0
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


def _chunks_of(world: int, moves: list[Move]) -> tuple[list[int], list[int]]:
    """Return each tensor's rows on a rank, padding included, and their elements."""
    chunks = [-(-m.shape[0] // world) for m in moves]
    return chunks, [chunk * math.prod(m.shape[1:]) for chunk, m in zip(chunks, moves, strict=True)]


def gathered(mover: Mover, moves: list[Move]) -> StagedEmission:
    """Gather the full parameters of one bucket from every rank's shards."""
    world = mover.world
    chunks, sizes = _chunks_of(world, moves)
    flats = []
    for chunk, m in zip(chunks, moves, strict=True):
        start, end = chunk_bounds(m.shape[0], world, mover.rank)  # the last ranks may have fewer rows
        local = _flat(mover, m.start, m.shape)
        missing = (chunk - (end - start)) * math.prod(m.shape[1:])  # gathered chunks have one size
        flats.append(mover.call(aten.constant_pad_nd.default, local, [0, missing]) if missing else local)
    alone = len(flats) == 1
    flat = mover.call(aten.contiguous.default, flats[0]) if alone else mover.call(aten.cat.default, flats)
    work = mover.issue(collectives.all_gather_into_tensor.default, flat, world, mover.group)
    yield
    rows = mover.call(aten.view.default, mover.wait(work), [world, -1])
    pieces = mover.call(aten.split_with_sizes.default, rows, sizes, 1)
    results = []
    for i, (chunk, m) in enumerate(zip(chunks, moves, strict=True)):
        full = mover.call(aten.reshape.default, _item(mover, pieces, i), [world * chunk, *m.shape[1:]])
        padded = chunk * world != m.shape[0]  # the tail is cut off
        results.append(mover.call(aten.slice.Tensor, full, 0, 0, m.shape[0]) if padded else full)
    return results


def _flat(mover: Mover, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node if len(shape) == 1 else mover.call(aten.reshape.default, node, [-1])


def _view(mover: Mover, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node if len(shape) == 1 else mover.call(aten.view.default, node, list(shape))


def _item(mover: Mover, node: fx.Node, index: int) -> fx.Node:
    return mover.call(operator.getitem, node, index)
