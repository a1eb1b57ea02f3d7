"""Random layouts and the plain reference that reshards are compared with."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from shard_reshard.layout.boxes import BoxShardMap, FusedShardMap
from shard_reshard.layout.shard_map import MeshShardMap, ShardMap
from shard_spec import Box, Layout, MeshSpec

_KINDS = ("R", "S({d})", "S({d})", "S({d})", "I({d},2)", "B({d},2)", "B({d},1,cyclic)")


def random_shape(rng: random.Random, most: int = 8) -> tuple[int, ...]:
    sizes = [1, 2, 3, 4, 5, 7, most]
    shape = [rng.choice(sizes) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3]))]
    if shape and rng.random() < 0.05:
        shape[rng.randrange(len(shape))] = 0
    return tuple(shape)


def random_layout(rng: random.Random, shape: tuple[int, ...], world_size: int) -> ShardMap:
    """A mesh over some of the ranks in any order, free boxes, or sections of a dim; each may replicate."""
    if shape and rng.random() < 0.15:
        return _sections(rng, shape, world_size)
    return _on_mesh(rng, shape, world_size) if rng.random() < 0.7 else _free_boxes(rng, shape, world_size)


def _sections(rng: random.Random, shape: tuple[int, ...], world_size: int) -> ShardMap:
    """A fused weight: runs of one dim, each divided on its own, some held by several ranks alike."""
    count, dim = rng.randint(1, world_size), rng.randrange(len(shape))
    ranks = rng.sample(range(world_size), count)
    marks = sorted({0, shape[dim], *(rng.randint(0, shape[dim]) for _ in range(rng.randint(0, 2)))})
    boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for low, high in pairwise(marks) if len(marks) > 1 else [(0, 0)]:
        copies = rng.choice([step for step in range(1, count + 1) if count % step == 0])
        step = -(-(high - low) // (count // copies))
        for place, rank in enumerate(ranks):
            start = min(low + place // copies * step, high)
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, min(start + step, high) - start
            boxes[rank].append(Box(tuple(offsets), tuple(sizes)))
    return FusedShardMap(shape, boxes, dim)


def _on_mesh(rng: random.Random, shape: tuple[int, ...], world_size: int) -> ShardMap:
    count = rng.randint(1, world_size)
    sizes = rng.choice([(count,), *[(a, count // a) for a in range(2, count) if count % a == 0]])
    texts = []
    for _ in sizes:
        dim = rng.randrange(-len(shape), len(shape)) if shape else 0
        texts.append(rng.choice(_KINDS).format(d=dim) if shape else "R")
    axes = {f"axis{at}": size for at, size in enumerate(sizes)}
    return MeshShardMap(Layout(MeshSpec(axes, rng.sample(range(world_size), count)), ", ".join(texts)), shape)


def _free_boxes(rng: random.Random, shape: tuple[int, ...], world_size: int) -> ShardMap:
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(boxes))
        offsets, sizes = boxes[at]
        dim = rng.randrange(len(shape)) if shape else 0
        if shape and sizes[dim] > 1:
            cut = rng.randint(1, sizes[dim] - 1)
            left = (*sizes[:dim], cut, *sizes[dim + 1 :])
            right = (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])
            moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
            boxes[at : at + 1] = [(offsets, left), (moved, right)]
    by_rank: dict[int, list[Box]] = {}
    for offsets, sizes in boxes:
        for rank in rng.sample(range(world_size), min(world_size, rng.choice([1, 1, 1, 2]))):
            by_rank.setdefault(rank, []).append(Box(offsets, sizes))
    return BoxShardMap(shape, by_rank)


def local_tensors(layout: ShardMap, rank: int, full: torch.Tensor) -> list[torch.Tensor]:
    """What `rank` holds of `full`, cut with plain indexing."""
    if isinstance(layout, FusedShardMap):
        boxes = layout.boxes.get(rank)
        return [] if boxes is None else [torch.cat([full[box.slices()] for box in boxes], layout.dim)]
    if isinstance(layout, BoxShardMap):
        return [full[box.slices()].clone() for box in layout.boxes.get(rank, ())]
    assert isinstance(layout, MeshShardMap)
    if rank not in layout.rank_set:
        return []
    local = full
    for dim, intervals in enumerate(layout.layout.intervals(rank, layout.shape)):
        local = torch.cat([local.narrow(dim, start, size) for start, size in intervals], dim)
    return [local.clone()]


def as_listed(result: object) -> list[torch.Tensor]:
    """What a reshard returned, as a list."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]  # a list
