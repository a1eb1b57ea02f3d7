"""Ranks compare what they are about to do: equal ranks pay one header, differing and failing ones raise together."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shared import consensus
from shared.consensus import as_bytes
from shared.problems import PlanError
from torch.distributed.device_mesh import init_device_mesh


@pytest.mark.ranks(4)
def test_equal_ranks_exchange_one_header(ranks: Ranks) -> None:
    with ranks.record() as log:
        consensus.assert_consistent(dist.group.WORLD, "apply", ["a", "b"])
    assert log.ops == ("all_gather",)
    assert sum(log.events[0].bytes_sent) == 3 * consensus.HEADER_BYTES


@pytest.mark.ranks(4)
def test_a_mesh_is_gathered_in_its_own_order(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = consensus.all_gather_header(mesh, bytes([dist.get_rank()]), "test")
    assert [row[0] for row in rows] == consensus.ranks_of(mesh) == [0, 1, 2, 3]
    assert consensus.all_gather_objects(mesh, f"r{dist.get_rank()}", "test") == ["r0", "r1", "r2", "r3"]


@pytest.mark.ranks(4)
def test_one_error_on_a_mesh_reaches_every_rank(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    _, error = consensus.capture_errors(lambda: 1 / (rank != 2))
    with pytest.raises(ZeroDivisionError if rank == 2 else PlanError) as caught:
        consensus.assert_consistent(mesh, "apply", ["same"], error)
    if rank != 2:
        (problem,) = caught.value.problems  # type: ignore[attr-defined]  # a PlanError
        assert problem.code == "rank-failed"
        assert "rank 2: ZeroDivisionError" in problem.found


@pytest.mark.ranks(2)
def test_differing_lines_are_named_with_their_ranks(ranks: Ranks) -> None:
    with pytest.raises(PlanError, match=r"rank 0: weight 0; rank 1: weight 1") as caught:
        consensus.assert_consistent(dist.group.WORLD, "apply", ["mesh", f"weight {dist.get_rank()}"])
    assert [problem.code for problem in caught.value.problems] == ["ranks-disagree"]
    with pytest.raises(PlanError, match=r"rank 0: load; rank 1: save"):  # ranks in different calls
        consensus.assert_consistent(dist.group.WORLD, ("load", "save")[dist.get_rank()], ["same"])


@pytest.mark.ranks(2)
def test_a_peer_that_never_comes_is_an_error_with_the_call(ranks: Ranks) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"load weights, call 1, got no answer .* on rank 0: another rank died"):
            consensus.assert_consistent(group, "load weights", ["same"])


def test_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    as_bytes(tensor).fill_(255)
    assert tensor.isnan().all()
    assert as_bytes(torch.tensor(3.0)).tolist() == [0, 0, 64, 64]
    assert as_bytes(torch.arange(6.0).view(2, 3).t()).view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert as_bytes(torch.arange(8.0)[2::2][:1]).view(torch.float32).tolist() == [2]
