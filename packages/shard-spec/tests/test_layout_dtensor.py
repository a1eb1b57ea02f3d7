"""Layouts against DTensor's own shapes and offsets, on random cases (issue target: at least 10,000)."""

import random
from typing import Any

from shard_spec import Layout, MeshSpec, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard

NUM_CASES = 10_500
RANKS_PER_CASE = 2


def random_case(rng: Any, strided: Any) -> Any:
    """One (shape, mesh, placements); `strided` adds DTensor's strided shards, our interleaved ones."""
    shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 31, 64)) for _ in range(rng.randint(1, 4)))
    mesh = MeshSpec({f"a{i}": rng.choice((1, 2, 3, 4, 8)) for i in range(rng.randint(1, 3))})
    placements = []
    for _ in range(mesh.ndim):
        dim = rng.randrange(len(shape))
        choices = [Shard(dim), Shard(dim), Replicate(), Partial("sum")]
        if strided:
            choices.append(_StridedShard(dim, split_factor=rng.choice((1, 2, 3, 4))))
        placements.append(rng.choice(choices))
    return shape, mesh, placements


def test_shapes_and_offsets_equal_dtensors_on_ten_thousand_random_cases() -> None:
    rng = random.Random(0)
    compared = 0
    for _ in range(NUM_CASES):
        shape, mesh, placements = random_case(rng, strided=False)
        layout = Layout(mesh, placements)
        for _ in range(RANKS_PER_CASE):
            rank = rng.randrange(mesh.world_size)
            expected = dtensor_shape_and_offset(shape, mesh.shape, list(mesh.coordinate(rank)), placements)
            assert (layout.local_shape(rank, shape), layout.offsets(rank, shape)) == expected, (layout, shape, rank)
            compared += 1
    assert compared == NUM_CASES * RANKS_PER_CASE >= 10_000


def test_interleaved_shapes_and_first_offsets_equal_dtensors_strided_shards() -> None:
    rng = random.Random(1)
    compared = 0
    while compared < 1_500:
        shape, mesh, placements = random_case(rng, strided=True)
        if not any(isinstance(placement, _StridedShard) for placement in placements):
            continue
        layout = Layout(mesh, placements)
        rank = rng.randrange(mesh.world_size)
        local, offsets = dtensor_shape_and_offset(shape, mesh.shape, list(mesh.coordinate(rank)), placements)
        assert layout.local_shape(rank, shape) == local, (layout, shape, rank)
        boxes = layout.boxes(rank, shape)
        if boxes:
            assert boxes[0].offsets == offsets, (layout, shape, rank)
        else:
            assert 0 in local
        assert sum(box.numel for box in boxes) == layout_numel(local)
        compared += 1


def layout_numel(shape: Any) -> Any:
    numel = 1
    for size in shape:
        numel *= size
    return numel
