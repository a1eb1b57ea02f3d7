"""torch.compile: calls run between graphs, no rank drops one, and what is right without it is right with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from ranktest import warm_up_compiler as before_ranks  # noqa: F401  # ranktest calls it
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


def _compiled(function: Callable[..., Any], one_graph: bool = False) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=one_graph, backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about its imports on some builds
@pytest.mark.ranks(2)
def test_calls_run_between_graphs_and_no_rank_drops_one(ranks: Ranks) -> None:
    full = torch.arange(24.0).view(SHAPE)
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))

    def discarding(local: torch.Tensor) -> torch.Tensor:
        moved = resharder(local * 2)
        return moved + 1 if ranks.rank else local.sum()

    compiled = _compiled(discarding)
    for step in range(3):
        with ranks.record() as log, ranks.delayed():
            result = compiled(full.chunk(2)[ranks.rank] + step)
        assert log.count("all_to_all") == 1  # also on rank 0, which does not look at the result
        if ranks.rank:
            assert torch.equal(result, 2 * (full + step).chunk(2, 1)[1] + 1)

    bounded = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)", max_workspace_bytes=48))

    def squares(local: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (bounded(local * 1) ** 2).sum()
        return total

    def one_shot(local: torch.Tensor) -> torch.Tensor:
        moved = reshard(local * 1, "2: S(0)", "2: S(1)", shape=SHAPE, max_workspace_bytes=48)
        total: torch.Tensor = (moved**2).sum()
        return total

    for function in (squares, one_shot):
        local = full.chunk(2)[ranks.rank].clone().requires_grad_()
        with ranks.record() as log, ranks.delayed():  # three bounded rounds, forth and back
            torch.autograd.backward(_compiled(function)(local))
        assert log.count("all_to_all") == 2 * 3
        assert local.grad is not None
        assert torch.equal(local.grad, 2 * full.chunk(2)[ranks.rank])
        with pytest.raises(Exception, match="Skip inlining"):
            _compiled(function, one_graph=True)(full.chunk(2)[ranks.rank])
    _sources_and_destinations_that_not_every_rank_has(ranks, full)
    _dtensors_specs_and_state_dicts(ranks, full)


def _sources_and_destinations_that_not_every_rank_has(ranks: Ranks, full: torch.Tensor) -> None:
    scatter = Resharder(plan_reshard(SHAPE, torch.float32, "rank 0", "2: S(1)"), check="always")
    gather = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(1)", "rank 1"))
    columns, source = full.chunk(2, 1)[ranks.rank], full if ranks.rank == 0 else None
    assert torch.equal(_compiled(lambda t: scatter(t) + 1)(source), columns + 1)
    assert torch.equal(_compiled(lambda t: reshard(t, "rank 0", "2: S(1)", shape=SHAPE) + 1)(source), columns + 1)
    gathered = _compiled(lambda t: gather(t * 2))(columns)
    assert gathered is None if ranks.rank == 0 else torch.equal(gathered, full * 2)

    def into(local: torch.Tensor | None, out: torch.Tensor) -> Any:
        return scatter(local, out=out)

    out = torch.zeros(4, 3)
    assert torch.equal(_compiled(into)(source, out), columns)
    for odd in (torch.zeros(2, 4, 3), torch.zeros(4, 3, dtype=torch.int32)):
        with pytest.raises(PlanError, match=r"shape-mismatch|dtype-mismatch") as caught:
            _compiled(into)(source, odd if ranks.rank else out)
        assert len(set(ranks.gather(str(caught.value)))) == 1


def _dtensors_specs_and_state_dicts(ranks: Ranks, full: torch.Tensor) -> None:
    mesh, columns = ranks.mesh((2,), ("dp",)), full.chunk(2, 1)[ranks.rank]

    def moved(dtensor: Any) -> Any:
        return redistribute(dtensor * 2, mesh, [Shard(1)])

    # A sum over ranks on its way, whose gradient is not added up: DTensor's meaning, as without the compiler.
    results: list[Any] = []
    for function in (moved, _compiled(moved)):
        dtensor = DTensor.from_local(full + ranks.rank, mesh, [Partial()]).requires_grad_()
        with ranks.record() as log:
            result: Any = function(dtensor)
            (result.to_local() * columns).sum().backward()
        grad: Any = dtensor.grad
        results.append((result.placements, result.to_local(), grad.placements, grad.to_local()))
        assert log.count("all_to_all") == 2
    plain, compiled = results
    assert plain[::2] == compiled[::2]
    assert all(map(torch.equal, plain[1::2], compiled[1::2]))
    specs = [ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]) for dim in (0, 1)]

    def seeds(local: torch.Tensor) -> torch.Tensor:
        (shard,), _ = reshard_local_shard(local, SHAPE, specs[0], specs[1], None)
        tensor: torch.Tensor = shard.tensor
        return tensor + 1

    rows = full.chunk(2)[ranks.rank]
    assert torch.equal(_compiled(seeds)(rows), columns + 1)

    def state(local: torch.Tensor) -> torch.Tensor:
        sources = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
        tensor: torch.Tensor = reshard_state_dict(sources, (mesh, [Replicate()]))["w"].to_local()
        return tensor * 2

    assert torch.equal(_compiled(state)(rows), full * 2)
