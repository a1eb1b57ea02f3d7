"""Specs as values, and the faults of torch's specs (each named where ours differs)."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from shard_spec import ShardingPlan
from shard_spec._shared.problems import PlanError
from shard_spec.layout.layout import Box
from shard_spec.plan.content import is_sharder
from shard_spec.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RemoteDevice,
    Sharder,
    ShardingSpec,
    ShardMetadata,
    TensorShards,
    as_spec,
    from_torch,
    to_torch,
)
from torch.distributed._shard.metadata import ShardMetadata as TorchShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec as TorchEnumerable
from torch.distributed._shard.sharding_spec.api import ShardingSpec as TorchSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec as TorchChunk
from torch.distributed.remote_device import _remote_device


def cpu(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def codes(error: pytest.ExceptionInfo[PlanError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


# ---- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["rank:0/cuda:0", "rank:3/cpu", "rank:12", "trainer0/cpu", "trainer0", "ps0/cuda:1", "cpu", "cuda:1"]
)
def test_devices_read_what_torch_reads(text: str) -> None:
    ours, theirs = RemoteDevice(text), _remote_device(text)
    assert (ours.rank(), ours.worker_name(), ours.device()) == (theirs.rank(), theirs.worker_name(), theirs.device())
    assert str(ours) == repr(theirs)
    assert RemoteDevice(theirs) == ours
    assert eval(repr(ours)) == ours
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert to_torch(ours) == theirs


def test_devices_take_torch_devices_and_normal_forms() -> None:
    assert RemoteDevice(torch.device("cuda", 1)) == RemoteDevice("cuda:1")
    assert RemoteDevice("rank:03/cpu") == RemoteDevice("rank:3")
    assert RemoteDevice(RemoteDevice("rank:3")) == RemoteDevice("rank:3/cpu")


@pytest.mark.parametrize(
    "wrong", ["", "/cpu", "rank:0/", "rank:x/cpu", "a:b/cpu", "a/b/cpu", "rank:0/nowhere", 3, None]
)
def test_wrong_devices(wrong: object) -> None:
    with pytest.raises(PlanError) as error:
        RemoteDevice(wrong)
    assert codes(error) == ["invalid-layout"]


# ---- chunk specs --------------------------------------------------------------------------------------------------


def test_chunk_offsets_of_9_rows_on_8_ranks_stay_inside() -> None:
    # torch: offsets 0, 2, ..., 10, 12, 14 of 9 rows, which its own checker then rejects.
    theirs = TorchChunk(0, cpu(*range(8)))
    properties = TensorProperties()
    offsets = [
        shard.shard_offsets[0] for shard in theirs.build_metadata(torch.Size((9, 2)), properties).shards_metadata
    ]
    assert offsets[-1] == 14
    shards = ChunkShardingSpec(0, cpu(*range(8))).shards_for((9, 2))
    assert [shard.shard_offsets[0] for shard in shards] == [0, 2, 4, 6, 8, 9, 9, 9]
    assert [shard.shard_sizes[0] for shard in shards] == [2, 2, 2, 2, 1, 0, 0, 0]


def test_chunks_are_those_of_torch_chunk() -> None:
    rng = random.Random(0)
    compared = 0
    for _ in range(500):
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 3)))
        world, dim = rng.randint(1, 6), rng.randrange(-len(shape), len(shape))
        ranks = rng.sample(range(10), world)
        spec = ChunkShardingSpec(dim, cpu(*ranks))
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = list(full.chunk(world, dim)) if shape[dim] else []
        for at, rank in enumerate(ranks):
            (box,) = spec.boxes(shape)[rank]
            expected = chunks[at] if at < len(chunks) else full.narrow(dim, 0, 0)
            assert torch.equal(full[box.slices()], expected)
            compared += 1
    assert compared > 1000


def test_the_callers_list_is_left_alone() -> None:
    placements = cpu(0, 1)
    theirs = list(placements)
    TorchChunk(0, theirs)
    assert theirs != placements  # torch writes its remote devices into the caller's list
    spec = ChunkShardingSpec(0, placements)
    assert placements == cpu(0, 1)
    placements.append("rank:2/cpu")
    assert len(spec.placements) == 2


def test_no_placements() -> None:
    # torch: accepted, then ZeroDivisionError from build_metadata.
    with pytest.raises(ZeroDivisionError):
        TorchChunk(0, []).build_metadata(torch.Size((4,)), TensorProperties())
    with pytest.raises(PlanError) as error:
        ChunkShardingSpec(0, [])
    assert codes(error) == ["missing-argument"]


def test_every_wrong_part_of_a_chunk_spec_is_reported_at_once() -> None:
    with pytest.raises(PlanError) as error:
        ChunkShardingSpec("rows", ["rank:0/cpu", "rank:x/cpu", 7])  # type: ignore[arg-type]
    assert codes(error) == ["invalid-layout", "invalid-layout", "invalid-layout"]


def test_negative_dims_are_compared_by_what_they_mean() -> None:
    # torch compares dims as written, so -1 -> 1 of a matrix is taken for a change of layout (and then fails).
    last, second, first = (ChunkShardingSpec(dim, cpu(0, 1)) for dim in (-1, 1, 0))
    assert last.to_layout((4, 6)) == second.to_layout((4, 6)) != first.to_layout((4, 6))
    assert last.to_layout((4, 6, 2)) == ChunkShardingSpec(2, cpu(0, 1)).to_layout((4, 6, 2))
    assert last.normalized(2) == second
    assert last.normalized(3) == ChunkShardingSpec(2, cpu(0, 1))


@pytest.mark.parametrize(("dim", "shape"), [(2, (4, 6)), (-3, (4, 6)), (0, ())])
def test_dims_that_a_tensor_does_not_have(dim: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as error:
        ChunkShardingSpec(dim, cpu(0)).shards_for(shape)
    assert codes(error) == ["dim-out-of-range"]


def test_values_are_values() -> None:
    for value in (
        ChunkShardingSpec(-1, ["rank:1/cuda:1", "rank:0/cuda:0"]),
        EnumerableShardingSpec([ShardMetadata([0, 0], [2, 3], "rank:0/cpu"), ShardMetadata([2, 0], [1, 3], "rank:1")]),
        ShardMetadata([1], [2]),
    ):
        assert eval(repr(value)) == value
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(pickle.loads(pickle.dumps(value))) == hash(value)
    assert ChunkShardingSpec(0, "rank:0/cpu").placements == (RemoteDevice("rank:0"),)


def test_a_placement_without_a_rank() -> None:
    with pytest.raises(PlanError) as error:
        ChunkShardingSpec(0, ["cuda:0", "trainer/cpu"]).boxes((4,))
    assert codes(error) == ["invalid-layout"] * 2


# ---- enumerable specs ---------------------------------------------------------------------------------------------


def test_enumerable_shards_have_to_be_a_cut() -> None:
    left = ShardMetadata([0, 0], [4, 3], "rank:0")
    with pytest.raises(PlanError) as overlap:
        EnumerableShardingSpec([left, ShardMetadata([3, 2], [1, 3], "rank:1")])
    assert codes(overlap) == ["boxes-overlap"]
    assert "(3, 2)" in str(overlap.value)
    with pytest.raises(PlanError) as empty:
        EnumerableShardingSpec([])
    assert codes(empty) == ["boxes-incomplete"]
    with pytest.raises(PlanError) as ndims:
        EnumerableShardingSpec([left, ShardMetadata([9], [1], "rank:1")])
    assert codes(ndims) == ["shape-mismatch"]
    spec = EnumerableShardingSpec([left, ShardMetadata([0, 3], [3, 3], "rank:1")])
    with pytest.raises(PlanError) as holes:
        spec.shards_for((4, 6))
    assert codes(holes) == ["boxes-incomplete"]
    assert "21 of 24" in str(holes.value)
    with pytest.raises(PlanError) as outside:
        spec.shards_for((3, 6))
    assert codes(outside) == ["box-out-of-range"]
    with pytest.raises(PlanError) as wrong_ndim:
        spec.shards_for((24,))
    assert codes(wrong_ndim) == ["shape-mismatch"]


def test_overlaps_are_found_like_an_exhaustive_search_finds_them() -> None:
    rng = random.Random(1)
    overlapping = 0
    for _ in range(400):
        ndim = rng.randint(1, 3)
        boxes = [
            Box(tuple(rng.randint(0, 5) for _ in range(ndim)), tuple(rng.randint(0, 3) for _ in range(ndim)))
            for _ in range(rng.randint(1, 5))
        ]
        overlap = any(one.intersect(two) for at, one in enumerate(boxes) for two in boxes[:at])
        shards = [ShardMetadata(box.offsets, box.sizes, "rank:0") for box in boxes]
        if overlap:
            overlapping += 1
            with pytest.raises(PlanError, match="boxes-overlap"):
                EnumerableShardingSpec(shards)
        else:
            EnumerableShardingSpec(shards)
    assert 50 < overlapping < 350


def test_wrong_shards() -> None:
    with pytest.raises(PlanError) as error:
        ShardMetadata([0, -1], [1], "rank:0")
    assert codes(error) == ["shape-mismatch", "box-out-of-range"]
    with pytest.raises(PlanError) as kind:
        EnumerableShardingSpec(["rank:0/cpu"])
    assert codes(kind) == ["wrong-type"]


# ---- layouts ------------------------------------------------------------------------------------------------------


def holdings(spec: ShardingSpec, shape: tuple[int, ...]) -> dict[int, tuple[Box, ...]]:
    boxes = spec.boxes(shape)
    return {rank: tuple(box for box in boxes.get(rank, ()) if box.numel) for rank in range(12)}


def test_a_chunk_spec_is_a_layout_on_a_permuted_mesh() -> None:
    compared = 0
    for shape in [(9, 2), (2, 9), (5,), (0, 3), (4, 4, 4)]:
        for ranks in [(0, 1), (3, 1, 2), (1, 0, 2, 3, 7, 6, 5, 4), (5,)]:
            for dim in range(-len(shape), len(shape)):
                spec = ChunkShardingSpec(dim, cpu(*ranks))
                layout = spec.to_layout(shape)
                assert {rank: layout.boxes(rank, shape) for rank in range(12)} == holdings(spec, shape)
                assert tuple(layout.mesh.ranks) == ranks
                compared += 1
    assert compared == 4 * 2 * (2 + 2 + 1 + 2 + 3)


def test_rows_columns_and_grids_are_layouts() -> None:
    shape = (5, 7)

    def enumerate_shards(rows: list[int], columns: list[int], ranks: list[int]) -> EnumerableShardingSpec:
        shards, at = [], 0
        for row, height in enumerate(rows):
            for column, width in enumerate(columns):
                offsets = [sum(rows[:row]), sum(columns[:column])]
                shards.append(ShardMetadata(offsets, [height, width], f"rank:{ranks[at]}"))
                at += 1
        random.Random(at).shuffle(shards)
        return EnumerableShardingSpec(shards)

    for rows, columns, text in [
        ([3, 2], [7], "shard0:S(0)"),
        ([5], [4, 3], "shard1:S(1)"),
        ([3, 2], [4, 3], "shard0:S(0), shard1:S(1)"),
        ([2, 3], [7], "shard0:U(0,[2,3])"),
        ([1, 4], [4, 3], "shard0:U(0,[1,4]), shard1:S(1)"),
        ([5], [7], "shard0:S(0)"),
        ([3, 2, 0, 0], [7], "shard0:U(0,[3,2,0,0])"),
    ]:
        ranks = list(range(len(rows) * len(columns)))[::-1]
        spec = enumerate_shards(rows, columns, ranks)
        layout = spec.to_layout(shape)
        assert str(layout) == text
        assert {rank: layout.boxes(rank, shape) for rank in range(12)} == holdings(spec, shape)
        assert tuple(layout.mesh.ranks) == tuple(ranks) or 0 in rows


def test_what_is_no_layout_says_why() -> None:
    bricks = [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 2)), ((2, 2), (2, 4))]
    spec = EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{at}") for at, (o, s) in enumerate(bricks)])
    with pytest.raises(PlanError) as grid:
        spec.to_layout((4, 6))
    assert codes(grid) == ["not-a-grid"]
    with pytest.raises(PlanError) as twice:
        ChunkShardingSpec(0, cpu(0, 1, 0)).to_layout((4, 6))
    assert codes(twice) == ["invalid-layout"]


# ---- users' own, and torch's --------------------------------------------------------------------------------------


class Halves(ShardingSpec):
    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        rows, columns = tensor_sizes
        top = rows // 2
        shards = [
            ShardMetadata([0, 0], [top, columns], "rank:0"),
            ShardMetadata([top, 0], [rows - top, columns], "rank:1"),
        ]
        return TensorShards(shards, tensor_sizes, tensor_properties)


class TorchHalves(TorchSpec):
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: Any) -> Any:
        rows, columns = tensor_sizes
        shards = [
            TorchShardMetadata([0, 0], [rows // 2, columns], "rank:0/cpu"),
            TorchShardMetadata([rows // 2, 0], [rows - rows // 2, columns], "rank:1/cpu"),
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        raise AssertionError("torch's specs do not shard here")


def test_a_users_own_spec() -> None:
    assert Halves().boxes((5, 2)) == {0: (Box((0, 0), (2, 2)),), 1: (Box((2, 0), (3, 2)),)}
    assert str(Halves().to_layout((5, 2))) == "shard0:U(0,[2,3])"
    assert Halves().boxes((6, 2)) == ChunkShardingSpec(0, cpu(0, 1)).boxes((6, 2))
    assert to_torch(Halves(), shape=(5, 2)).shards[1].shard_offsets == [2, 0]
    with pytest.raises(PlanError, match="missing-argument"):
        to_torch(Halves())


def test_torch_specs_both_ways() -> None:
    theirs = TorchChunk(1, ["rank:1/cpu", "rank:0/cpu"])
    ours = ChunkShardingSpec(1, ["rank:1", "rank:0"])
    assert from_torch(theirs) == ours
    assert to_torch(ours) == theirs
    shard = TorchShardMetadata([0, 0], [2, 2], "rank:0/cpu")
    assert from_torch(shard) == ShardMetadata([0, 0], [2, 2], "rank:0")
    assert to_torch(ShardMetadata([0, 0], [2, 2], "rank:0")) == shard
    assert to_torch(ShardMetadata([0], [2])).placement is None
    listed = TorchEnumerable([shard])
    assert from_torch(listed) == EnumerableShardingSpec([shard])
    assert to_torch(EnumerableShardingSpec([shard])) == listed
    assert from_torch(_remote_device("rank:1/cuda:1")) == RemoteDevice("rank:1/cuda:1")
    with pytest.raises(PlanError, match=r"wrong-type.*subclass of shard_spec.ShardingSpec"):
        from_torch(TorchHalves())
    plan = ShardingPlan({"weight": TorchHalves()})
    assert [problem.code for problem in plan.validate(torch.nn.Linear(4, 4))] == ["wrong-type"]
    assert plan.digest


def test_torch_specs_are_taken_for_specs() -> None:
    from torch.distributed._shard.sharder import Sharder as TorchSharder

    class Theirs(TorchSharder):
        def shard(self, module: torch.nn.Module) -> torch.nn.Module:
            return module

    class Ours(Sharder):
        def shard(self, module: torch.nn.Module) -> torch.nn.Module:
            return module

    assert as_spec(TorchChunk(0, cpu(0))) == ChunkShardingSpec(0, cpu(0))
    assert as_spec(ChunkShardingSpec(0, cpu(0))) == ChunkShardingSpec(0, cpu(0))
    assert as_spec(Theirs()) is None
    assert as_spec("rows") is None
    ours: Any = Ours()
    theirs: Any = Theirs()
    assert is_sharder(ours)
    assert is_sharder(theirs)
    assert not is_sharder(ChunkShardingSpec(0, cpu(0)))
    for wrong in (3, "rank:0/cpu"):
        with pytest.raises(PlanError, match="wrong-type"):
            from_torch(wrong)
