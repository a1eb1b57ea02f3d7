"""What one rank cannot do, or does otherwise, every rank hears of before anything is communicated or changed."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition._shared.dtensor import as_dtensor
from dp_partition.plan.placements import chunk_bounds
from dp_partition.runtime.consensus import full_copies
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

SGD = partial(torch.optim.SGD, lr=0.1)


def started(ranks: Ranks) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.seeded(models.mlp).to(ranks.device)
    return model, SGD(model.parameters())


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_trace_stops_all(ranks: Ranks) -> None:
    """Without an agreement the other rank waits in its first collective until the group's timeout."""
    model, optim = started(ranks)
    before = [p.detach().clone() for p in model.parameters()]

    def train_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, broken: bool) -> Any:
        if broken:
            raise FileNotFoundError("the vocabulary of this host")
        return models.mean_step(model, optim, x)

    step = dp.compile(train_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x = torch.ones(4, 8, device=ranks.device)
    with pytest.raises(dp.PlanError, match="the vocabulary of this host") as caught:
        step(model, optim, x, ranks.rank == 1)
    (problem,) = caught.value.problems
    assert problem.code == "not-traceable" and problem.found.startswith("on rank 1: ")
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, optim, x, False)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.ranks(2)
def test_batches_of_different_sizes(ranks: Ranks) -> None:
    """Under global semantics a mean would be over another number of rows on each rank: wrong, and nothing says so."""
    model, optim = started(ranks)
    mesh = ranks.mesh((2,), ("dp",))
    step = dp.compile(models.mean_step, mesh=mesh, semantics="global", batch=dp.Batch(dim=0))
    for num_rows in (4, 6):  # at the first call, and when the size changes later
        with pytest.raises(dp.PlanError, match=r"ranks-disagree.*rows") as caught:
            step(model, optim, torch.ones(num_rows + ranks.rank, 8, device=ranks.device))
        assert f"[{num_rows}, 8]" in str(caught.value)
        assert f"[{num_rows + 1}, 8]" in str(caught.value)
        step(model, optim, torch.ones(num_rows - 1, 8, device=ranks.device))


@pytest.mark.ranks(2)
def test_a_rank_may_retrace_alone_where_batches_are_its_own(ranks: Ranks) -> None:
    """The last batch of an epoch is shorter on one rank: each gradient is still the mean of the ranks'."""
    model, optim = started(ranks)
    reference = models.seeded(models.mlp)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard", check="never")
    generator = torch.Generator().manual_seed(7)
    logs = []
    for shorter in (0, 0, 1, 0, 1):
        batches = [torch.randn(4 - shorter * rank, 8, generator=generator) for rank in range(2)]
        with ranks.record() as log:
            step(model, optim, batches[ranks.rank].to(ranks.device))
        logs.append(log)
        steps_alone = [copy.deepcopy(reference) for _ in batches]
        for alone, batch in zip(steps_alone, batches, strict=True):
            models.mean_step(alone, SGD(alone.parameters()), batch)
        with torch.no_grad():  # a step of SGD is linear in the gradient: the mean of steps is the step of the mean
            for parameter, *moved in zip(*(m.parameters() for m in (reference, *steps_alone)), strict=True):
                parameter.copy_(torch.stack(moved).mean(0))
    assert step.num_traces == 1 + ranks.rank
    assert logs[1].ops == logs[2].ops == logs[4].ops
    assert logs[1].bytes_sent() == logs[2].bytes_sent() == logs[4].bytes_sent()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert len(pairs) == 4
    for param, expected in pairs:
        torch.testing.assert_close(param.full_tensor().cpu(), expected)  # type: ignore[attr-defined]  # a DTensor


@pytest.mark.ranks(2)
def test_steps_that_are_not_the_same(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    x = torch.ones(4, 8, device=ranks.device)
    model, optim = started(ranks)
    step = dp.compile(models.mean_step, mesh=mesh, style="fully_shard" if ranks.rank else "replicate")
    with pytest.raises(dp.PlanError, match=r"rank 0: plan: .*; rank 1: plan: "):
        step(model, optim, x)

    def by_rank(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, part: int) -> Any:
        loss = model(x).mean() if part == 0 else model[0](x).mean()  # type: ignore[index]
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    step = dp.compile(by_rank, mesh=mesh, style="replicate")
    with pytest.raises(dp.PlanError, match=r"rank 0: collectives: .*; rank 1: collectives: "):
        step(model, optim, x, ranks.rank)
    step(model, optim, x, 0)


@pytest.mark.ranks(3)
def test_full_copies_of_shards_take_one_message(ranks: Ranks) -> None:
    """Any dtype and stride, uneven and empty shards, replicated and plain tensors beside them."""
    mesh = ranks.mesh((3,), ("dp",))
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int16, torch.uint8)
    fulls = [(9 * torch.rand(rows, 3, generator=generator)).to(dtype) for dtype in dtypes for rows in (6, 5, 2, 0)]
    fulls += [torch.rand(4, 5, generator=generator).T, torch.rand(4, 0)]
    placed: list[torch.Tensor] = []
    for index, full in enumerate(fulls):
        start, end = chunk_bounds(full.shape[0], 3, ranks.rank)
        placed.append(as_dtensor(full[start:end].clone(), mesh, [Shard(0)], full.shape, full.stride()))
        if index < 2:
            placed += [as_dtensor(full, mesh, [Replicate()], full.shape, full.stride()), full]
    expected = [x for index, full in enumerate(fulls) for x in [full] * (3 if index < 2 else 1)]
    with ranks.record() as log:
        copies = full_copies(placed, mesh)
    assert log.ops == ("all_gather",)
    for got, full in zip(copies, expected, strict=True):
        assert torch.equal(got, full) and got.stride() == full.stride() and type(got) is torch.Tensor
        assert got.numel() == 0 or got.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
    assert len(copies) == 34


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_one_element_may_have_any_stride(ranks: Ranks, style: Any, door: Any) -> None:
    """Torch calls it contiguous, and yet refuses to view it as bytes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.arange(1.0, 5.0)[::2][:1])
            self.register_buffer("shift", torch.arange(12.0).view(3, 4).t()[:1, :1])

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) * self.scale + self.shift

    torch.manual_seed(0)
    model, x = Scaled(), torch.ones(4, 8)
    assert model.scale.stride() == (2,) and model.scale.is_contiguous()
    one = copy.deepcopy(model)
    optim, alone = SGD(model.parameters()), SGD(one.parameters())
    step = door(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    for _ in range(5):
        step(model, optim, x)
        models.mean_step(one, alone, x)
    step.release()
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["zero1", "zero2"])
def test_rows_that_one_rank_pads_are_sent_by_the_same_graph(ranks: Ranks, style: Any) -> None:
    """The updated rows are gathered for an evaluation and for the full parameter: a rank that pads has two nodes."""

    def step(model: nn.Module, optim: Any, x: torch.Tensor) -> Any:
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        with torch.no_grad():
            return loss, model(x).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    compiled = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    optim = SGD(model.parameters())
    losses = [compiled(model, optim, torch.ones(2, 3)) for _ in range(5)]
    assert all(float(after) < float(loss) for loss, after in losses)


@pytest.mark.ranks(2)
def test_state_in_shards_has_memory_of_its_own(ranks: Ranks) -> None:
    """Rows of a full tensor kept all of it."""

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "mean" not in state:
                        state["mean"] = p.new_zeros(p.shape)
                    state["mean"].mul_(0.9).add_(p.grad / (p.grad.norm() + 1e-3))
                    p.sub_(state["mean"], alpha=group["lr"])

    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optim = Momentum(model.parameters())
    compiled = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    for _ in range(5):
        compiled(model, optim, torch.ones(2, 4))
        local = optim.state[model.weight]["mean"]._local_tensor
        assert local.shape == (3, 4) and local.untyped_storage().nbytes() == local.nbytes
