"""torch.compile: one graph, no rank drops the collective, and what is right without it is right with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import (
    PlanError,
    Resharder,
    plan_reshard,
    redistribute,
    reshard,
    reshard_local_shard,
    reshard_state_dict,
)
from shard_spec.specs import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SHAPE = (4, 6)


def _one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about its imports on some builds
@pytest.mark.ranks(2)
def test_one_graph_that_no_rank_drops(ranks: Ranks) -> None:
    # One test for all, because every rank needs seconds to import the compiler.
    full = torch.arange(24.0).view(SHAPE)
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))

    def discarding(local: torch.Tensor) -> torch.Tensor:
        moved = resharder(local * 2)
        return moved + 1 if ranks.rank else local.sum()

    compiled = _one_graph(discarding)
    for step in range(3):
        with ranks.record() as log, ranks.delayed():
            found = compiled(full.chunk(2)[ranks.rank] + step)
        assert log.count("all_to_all") == 1  # also on rank 0, which does not look at the result
        if ranks.rank:
            assert torch.equal(found, 2 * (full + step).chunk(2, 1)[1] + 1)

    bounded = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)", max_workspace_bytes=48))

    def squares(local: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (bounded(local) ** 2).sum()
        return total

    def one_shot(local: torch.Tensor) -> torch.Tensor:
        moved = reshard(local * 1, "2: S(0)", "2: S(1)", shape=SHAPE, max_workspace_bytes=48)
        total: torch.Tensor = (moved**2).sum()
        return total

    for compiled in (_one_graph(squares), _graphs(one_shot)):  # one-shot calls run between graphs
        local = full.chunk(2)[ranks.rank].clone().requires_grad_()
        with ranks.record() as log, ranks.delayed():  # three bounded rounds, forth and back
            torch.autograd.backward(compiled(local))
        assert log.count("all_to_all") == 2 * 3
        assert local.grad is not None
        assert torch.equal(local.grad, 2 * full.chunk(2)[ranks.rank])
    with pytest.raises(Exception, match="Skip inlining"):
        _one_graph(one_shot)(full.chunk(2)[ranks.rank])
    _sources_and_destinations_that_not_every_rank_has(ranks, full)
    _dtensors_specs_and_state_dicts(ranks, full)


def _sources_and_destinations_that_not_every_rank_has(ranks: Ranks, full: torch.Tensor) -> None:
    scatter = Resharder(plan_reshard(SHAPE, torch.float32, "rank 0", "2: S(1)"), check="always")
    gather = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(1)", "rank 1"))
    columns = full.chunk(2, 1)[ranks.rank]
    assert torch.equal(_one_graph(lambda t: scatter(t))(full if ranks.rank == 0 else None), columns)
    whole = _one_graph(lambda t: gather(t))(columns)
    assert whole is None if ranks.rank == 0 else torch.equal(whole, full)

    def into(local: torch.Tensor | None, out: torch.Tensor) -> Any:
        return scatter(local, out=out)

    given = full if ranks.rank == 0 else None
    out = torch.zeros(4, 3)
    assert torch.equal(_one_graph(into)(given, out), columns)
    # A copy would broadcast to the one, and round into the other; and one rank's mistake is everybody's error.
    for odd in (torch.zeros(2, 4, 3), torch.zeros(4, 3, dtype=torch.int32)):
        with pytest.raises(PlanError, match="shape-mismatch") as caught:
            _one_graph(into)(given, odd if ranks.rank else out)
        assert len(set(ranks.gather(str(caught.value)))) == 1


def _dtensors_specs_and_state_dicts(ranks: Ranks, full: torch.Tensor) -> None:
    mesh, columns = ranks.mesh((2,), ("dp",)), full.chunk(2, 1)[ranks.rank]

    def moved(given: Any) -> Any:
        return redistribute(given * 2, mesh, [Shard(1)])

    # A sum over ranks on its way, whose gradient is not added up: DTensor's meaning, as without the compiler.
    found: list[Any] = []
    for function in (moved, _graphs(moved)):
        given = DTensor.from_local(full + ranks.rank, mesh, [Partial()]).requires_grad_()
        with ranks.record() as log:
            result: Any = function(given)
            (result.to_local() * columns).sum().backward()
        grad: Any = given.grad
        found.append((result.placements, result.to_local(), grad.placements, grad.to_local()))
        assert log.count("all_to_all") == 2
    plain, compiled = found
    assert plain[::2] == compiled[::2]
    assert all(map(torch.equal, plain[1::2], compiled[1::2]))
    specs = [ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]) for dim in (0, 1)]

    def seeds(given: torch.Tensor) -> torch.Tensor:
        (shard,), _ = reshard_local_shard(given, SHAPE, specs[0], specs[1], None)
        tensor: torch.Tensor = shard.tensor
        return tensor + 1

    assert torch.equal(_graphs(seeds)(full.chunk(2)[ranks.rank]), columns + 1)
    rows = full.chunk(2)[ranks.rank]
    layouts = {"dst_layouts": (mesh, [Replicate()]), "src_layouts": {"w": (mesh, [Shard(0)])}, "shapes": {"w": SHAPE}}
    result = _graphs(lambda t: reshard_state_dict({"w": t * 2}, **layouts)["w"].to_local())(rows)
    assert torch.equal(result, full * 2)
