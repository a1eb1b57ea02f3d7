"""The first call of a later trace is checked at once where all ranks trace; a rank that traces alone goes on."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import dp_models as models
import dp_partition as dp
import planted_mistakes as planted
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition import runner as runner_module
from dp_partition.api import runner_of
from dp_partition.check.checked_call import IN_A_ROW
from dp_partition.runtime import consensus
from ranktest import Ranks
from torch import fx, nn


def update(model: Any, optim: Any, loss: torch.Tensor) -> torch.Tensor:
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss


def weighted(model: Any, optim: Any, x: torch.Tensor, weight: int) -> torch.Tensor:
    return update(model, optim, weight * model(x).square().mean())


def with_sine(module: fx.GraphModule) -> fx.GraphModule:
    """A planted mistake, in every later trace."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sin.default
    module.recompile()
    return module


@contextmanager
def patience() -> Iterator[None]:
    """A busy machine may let a rank come later than a trace takes: within the block ranks wait for it."""
    decide = consensus.are_all_announced

    def wait_and_decide(label: str, ranks: list[int], *, waits: bool) -> bool:
        return decide(label, ranks, waits=True)

    with patch.object(runner_module, "are_all_announced", wait_and_decide):
        yield


def batch(ranks: Ranks, call: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + ranks.rank)
    return torch.randn(rows, 8, generator=generator).to(ranks.device)


def started(ranks: Ranks, style: Any, **settings: Any) -> tuple[dp.CompiledStep, Any, Any]:
    """A step after three calls: the fourth is due on no rank."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    step = dp.compile(weighted, mesh=ranks.mesh((ranks.world_size,), ("dp",)), style=style, **settings)
    for call in range(3):
        step(model, optim, batch(ranks, call), 1)
    runner_of(step).schedule.next = 7
    return step, model, optim


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_new_trace_is_checked_at_once(ranks: Ranks, style: Any) -> None:
    for number, kind in enumerate(("shape", "mode", "number", "frozen")):
        # Each style has both semantics, and each kind has both: local in one style, global in the other.
        semantics = ("local", "global")[(number + (style == "replicate")) % 2]
        with models.case(f"{kind} {semantics}"):
            step, model, optim = started(ranks, style, semantics=semantics)
            planted.change_graphs(step, with_sine)
            before = [p.full_tensor().clone() for p in model.parameters()]
            model.train(kind != "mode")
            model[0].weight.requires_grad_(kind != "frozen")
            with patience(), pytest.raises(dp.PlanError, match="check-mismatch"):
                step(model, optim, batch(ranks, 3, 6 if kind == "shape" else 4), 2 if kind == "number" else 1)
            after = [p.full_tensor() for p in model.parameters()]
            assert all(map(torch.equal, before, after)) and len(after) == 4
            step.release()


@pytest.mark.ranks(2)
def test_a_right_new_trace_is_counted_and_the_schedule_goes_on(ranks: Ranks) -> None:
    step, model, optim = started(ranks, "zero2")
    checked = runner_of(step).schedule.num_checked
    with patience():
        step(model, optim, batch(ranks, 3, 5), 1)
    assert runner_of(step).schedule.num_checked == checked + 1
    step(model, optim, batch(ranks, 4, 5), 1)
    assert runner_of(step).schedule.num_checked == checked + 1  # known by now, and none is due


@pytest.mark.ranks(2)
def test_a_rank_that_traces_alone_trains_on(ranks: Ranks) -> None:
    step, model, optim = started(ranks, "fully_shard")
    checked = runner_of(step).schedule.num_checked
    step(model, optim, batch(ranks, 3, 4 + ranks.rank % 2), 1)
    assert runner_of(step).schedule.num_checked == checked
    for call in range(4, 12):
        step(model, optim, batch(ranks, call, 4 + (ranks.rank + call) % 2), 1)
    assert runner_of(step).schedule.num_checked > checked  # the calls that are due, on all ranks
    assert step.num_traces == 2


@pytest.mark.ranks(2)
def test_a_trace_that_never_comes_again_does_not_keep_the_check_going(ranks: Ranks) -> None:
    step, model, optim = started(ranks, "zero2")
    for call in range(3, 40):
        step(model, optim, batch(ranks, call, 9 if call == 3 and ranks.rank else 4), 1)
    due = 3 + len([4, 8, 16, 32])  # of the schedule, without those for the trace
    assert runner_of(step).schedule.num_checked <= due + 2 * IN_A_ROW + 1
    assert step.num_traces == 1 + ranks.rank


@pytest.mark.ranks(1)
def test_a_rank_alone_asks_no_store(ranks: Ranks) -> None:
    """A fake group's store cannot answer."""
    with patch.object(consensus, "default_store", side_effect=AssertionError):
        step, model, optim = started(ranks, "replicate")
        checked = runner_of(step).schedule.num_checked
        step(model, optim, batch(ranks, 3, 6), 1)
        assert runner_of(step).schedule.num_checked == checked + 1


def trains_or_not(model: Any, optim: Any, x: torch.Tensor, trains: bool) -> torch.Tensor:
    if trains:
        return update(model, optim, model(x).square().mean())
    with torch.no_grad():
        loss: torch.Tensor = model(x).square().mean()
    return loss


@pytest.mark.ranks(2)
def test_checked_calls_without_collectives_do_not_part_the_ranks(ranks: Ranks) -> None:
    """Under a checked call without collectives nothing is exchanged: each rank's seed is its own."""
    for second in (False, True):
        model = models.seeded(models.mlp).to(ranks.device)
        plain = models.seeded(models.mlp).to(ranks.device)
        optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
        step = dp.compile(trains_or_not, mesh=ranks.mesh((ranks.world_size,), ("dp",)), style="replicate")
        torch.manual_seed(5 + ranks.rank)
        for call in range(36):
            x = batch(ranks, 0) * 0 + call / 10  # equal on all ranks: one device's training
            trains = call != 1 if second else call not in (1, 2, 3, 5, 6, 7)
            results = step(model, optims[0], x, trains), trains_or_not(plain, optims[1], x, trains)
            torch.testing.assert_close(*results)
        assert runner_of(step).schedule.num_checked >= 4
        step.release()


class ScaledByLength(nn.Module):
    """Rows scaled by a number made of their length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * (1 / x.shape[1])
        return out


def wrong_above_eight(module: fx.GraphModule) -> fx.GraphModule:
    """A planted mistake, in lengths above eight only."""
    scale = next(node for node in module.graph.nodes if node.target in (operator.truediv, torch.sym_float))
    with module.graph.inserting_after(scale):
        capped = module.graph.call_function(lambda number: max(number, 0.125), (scale,))
    scale.replace_all_uses_with(capped, delete_user_cb=lambda user: user is not capped)
    module.recompile()
    return module


def lengths_step(ranks: Ranks, **settings: Any) -> tuple[dp.CompiledStep, Any, Any]:
    model = models.seeded(ScaledByLength).to(ranks.device)
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard", mark_dynamic=1, **settings)
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(ranks: Ranks, call: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + ranks.rank)
    return torch.randn(2, length, 4, generator=generator).to(ranks.device)


@pytest.mark.ranks(2)
def test_a_length_that_one_rank_first_meets_late_is_checked_in_that_call(ranks: Ranks) -> None:
    step, model, optim = lengths_step(ranks)
    planted.change_graphs(step, wrong_above_eight)
    for call in range(19):
        step(model, optim, rows(ranks, call, 8))
    runner = runner_of(step)
    checked = runner.schedule.num_checked
    runner.schedule.next = 100  # none is due
    before = [p.full_tensor().clone() for p in model.parameters()]
    late = rows(ranks, 19, 12 if ranks.rank else 8)
    with pytest.raises(dp.PlanError, match="check-mismatch") as caught:
        step(model, optim, late)
    assert "call 20" in str(caught.value)
    after = [p.full_tensor() for p in model.parameters()]
    assert all(map(torch.equal, before, after)) and len(after) == 2
    step(model, optim, rows(ranks, 20, 8))  # the next call works, on all ranks
    assert runner.schedule.num_checked == checked + 1  # it follows a failed one
    step.release()


@pytest.mark.ranks(2)
def test_each_length_is_checked_once_on_all_ranks(ranks: Ranks) -> None:
    step, model, optim = lengths_step(ranks)
    runner = runner_of(step)
    counts = []
    for call, lengths in enumerate([(8, 8), (8, 8), (8, 9), (9, 8), (8, 9), (5, 6), (1, 8), (8, 8)]):
        runner.schedule.next = 100 if call else 1
        step(model, optim, rows(ranks, call, lengths[ranks.rank]))
        counts.append(runner.schedule.num_checked)
    assert counts == [1, 1, 2, 3, 3, 4, 5, 5]
    assert step.num_traces == 1 + (ranks.rank == 0)  # length 1 has a trace of its own
    step.release()


@pytest.mark.ranks(2)
def test_an_error_before_a_call_with_lengths_reaches_all_ranks(ranks: Ranks) -> None:
    step, model, optim = lengths_step(ranks)
    for call in range(3):
        step(model, optim, rows(ranks, call, 8))
    another = models.seeded(ScaledByLength).to(ranks.device) if ranks.rank else model
    with pytest.raises(dp.PlanError, match="model-mismatch" if ranks.rank else "rank-failed|model-mismatch"):
        step(another, optim, rows(ranks, 3, 8))
    step(model, optim, rows(ranks, 4, 9))
    step.release()
