"""All ranks raise together. A dead peer is an error that names rank and call."""

from __future__ import annotations

import datetime
from typing import Any

import bridge_models as models
import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from tp_ddp_bridge import PlanError, Problem, clip_grad_norm_, pre_dp_module_transform
from tp_ddp_bridge._shared.consensus import named_collective
from tp_ddp_bridge.consistency.replicas import raise_on_all_ranks


@pytest.mark.ranks(4)
def test_a_problem_of_one_rank_reaches_all_through_a_mesh_or_through_groups(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    for scope in ([mesh], [mesh["dp"].get_group(), mesh["tp"].get_group()]):
        raise_on_all_ranks(scope, "test", [])
        for guilty in range(4):
            mine = [Problem("bad", "weight", found=f"{ranks.rank}")] if ranks.rank == guilty else []
            with pytest.raises(PlanError) as caught:
                raise_on_all_ranks(scope, "test", mine)
            (problem,) = caught.value.problems
            assert problem.code == "bad" and str(guilty) in problem.found
        with pytest.raises(PlanError, match=r"ranks-disagree"):
            raise_on_all_ranks(scope, "test", [], [f"line {ranks.rank == 2}"])


@pytest.mark.ranks(4)
def test_one_line_for_what_several_groups_found(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    with pytest.raises(PlanError) as caught:
        raise_on_all_ranks(
            [mesh], "test", [Problem("replicas-differ", "bias", found=f"in {mesh['tp'].get_group().rank()}")]
        )
    (problem,) = caught.value.problems
    assert "in 0" in problem.found and "in 1" in problem.found


@pytest.mark.ranks(4)
def test_a_peer_that_does_not_come_is_an_error_with_rank_and_call(ranks: Ranks) -> None:
    pairs: Any = [[0, 1], [2, 3]]
    limit = datetime.timedelta(seconds=5)  # forward and backward are within it, on a busy machine too
    group, _ = dist.new_subgroups_by_enumeration(pairs, timeout=limit)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    assert isinstance(next(model.parameters()), DTensor)
    pre_dp_module_transform(model)
    model(torch.ones(2, 16)).sum().backward()
    expected_error = pytest.raises(RuntimeError, match=r"mine, call 1, failed on rank \d: another rank died")
    with expected_error, named_collective("mine"):
        raise RuntimeError("Connection closed by peer")
    if ranks.rank % 2 == 0:
        with pytest.raises(RuntimeError, match=rf"grad_norm, call \d+, failed on rank {ranks.rank}: another rank died"):
            clip_grad_norm_(model.parameters(), 1.0)
    assert Shard(0) in model.up.weight.placements
