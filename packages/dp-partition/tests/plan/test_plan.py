"""Planning: pure, printable, for any number of ranks."""

from __future__ import annotations

import json
import pickle

import dp_partition as dp
import pytest
import torch
from dp_partition.plan.placements import chunk_bounds, local_shape
from dp_partition.plan.plan import TensorInfo, plan_placements
from dp_partition.sharding.op_rules import follow_dim
from torch.distributed.tensor import Replicate, Shard

PARAMS = [
    TensorInfo("embed.weight", (31, 8), torch.float32),
    TensorInfo("up.weight", (64, 8), torch.float32),
    TensorInfo("up.bias", (64,), torch.bfloat16),
    TensorInfo("scale", (), torch.float32),
]


def test_every_element_lies_somewhere_once() -> None:
    for world in (1, 2, 3, 4, 1024):
        for style in dp.DataParallelStyle:
            plan = plan_placements(PARAMS, style, world)
            for param in plan.params:
                for placement in (param.param, param.grad, param.state):
                    total = sum(param.local_numel(placement, world, rank) for rank in range(world))
                    numel = torch.Size(param.info.shape).numel()
                    assert total == (numel if isinstance(placement, Shard) else numel * world)
    for size in (0, 1, 5, 8, 1000):
        for world in (1, 2, 3, 7, 16):
            chunks = torch.chunk(torch.arange(size), world) if size else ()
            for rank in range(world):
                start, end = chunk_bounds(size, world, rank)
                expected = chunks[rank].tolist() if rank < len(chunks) else []
                assert list(range(start, end)) == expected


def test_default_shards_what_divides() -> None:
    plan = plan_placements(PARAMS, dp.DataParallelStyle.DEFAULT, 4)
    assert [p.param for p in plan.params] == [Replicate(), Shard(0), Shard(0), Replicate()]
    assert "does not divide by 4" in plan.explain("embed.weight")
    assert plan.param_bytes() == 31 * 8 * 4 + 16 * 8 * 4 + 16 * 2 + 4
    restored = pickle.loads(pickle.dumps(plan))
    assert (restored, restored.digest) == (plan, plan.digest)
    assert json.loads(plan.to_json())["params"][1]["param"] == "S(0)"


def test_problems_of_a_plan_come_together() -> None:
    overrides = {"nothing.*": Replicate(), "up.weight": Shard(1), "scale": Shard(0)}
    plan = plan_placements(PARAMS, dp.DataParallelStyle.REPLICATE, 2, overrides=overrides)
    assert sorted(p.code for p in plan.problems) == ["invalid-layout", "invalid-layout", "unmatched-pattern"]
    error = dp.PlanError(plan.problems, "summary")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert len(str(error).splitlines()) == 4


def test_a_reshape_keeps_a_shard_only_if_the_chunks_are_the_same_elements() -> None:
    compared = 0
    for before, after in [((8, 6), (48,)), ((8, 6), (4, 2, 6)), ((2, 4, 6), (8, 6)), ((3, 8), (24,)), ((4, 6), (6, 4))]:
        data = torch.arange(torch.Size(before).numel())
        for dim in range(len(before)):
            target = follow_dim(before, after, dim, 2)
            if target is None:
                continue
            for rank in range(2):
                part = data.view(before).chunk(2, dim)[rank].reshape(local_shape(after, Shard(target), 2, rank))
                assert torch.equal(part, data.view(after).chunk(2, target)[rank])
                compared += 1
    assert compared >= 8


def test_bad_settings_are_refused_together() -> None:
    with pytest.raises(dp.PlanError, match="missing-mesh"):
        dp.compile(lambda: None)
