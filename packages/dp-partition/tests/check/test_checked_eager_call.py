"""Eager steps, compared in their first calls with the step on a full copy; planted mistakes are found there."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from dp_partition.check import checked_call
from dp_partition.check.reference import copy_step
from dp_partition.eager import step
from dp_partition.eager.reducer import GradientReducer
from dp_partition.eager.shards import shard
from dp_step_patterns import PATTERNS, WIDTH, mlp, mse_step
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

# Patterns with fewer than two comparisons: how many, and why no more.
UNCHECKED = {
    "gradient_hook_and_saving": (0, "a second run of save would be seen"),
    "sparse_embedding": (0, "the step has sparse gradients"),
    "target_network": (0, "a second run of range_iterator would be seen"),
    "torchscript_inside": (0, "RuntimeError: Tried to serialize"),
}


def _batch(call: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * call + rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, 3, generator=generator, dtype=torch.float64)


def _compiled(ranks: Ranks, function: Callable[..., Any], style: Any, **settings: Any) -> dp.DistributedStep:
    warnings.simplefilter("ignore")
    return dp.distribute(function, mesh=ranks.mesh((2,), ("dp",)), style=style, **settings)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_the_first_calls_of_every_pattern_are_compared(ranks: Ranks, style: Any) -> None:
    counts: dict[str, int] = {}
    names = list(PATTERNS)[:: 1 if style == "fully_shard" else 3]
    for name in names:
        torch.manual_seed(1)
        function, _ = PATTERNS[name]()
        compiled = _compiled(ranks, function, style)
        for call in range(4):
            compiled(*_batch(call, ranks.rank))
        runner = runner_of(compiled)
        number, reason = UNCHECKED.get(name, (2, ""))
        unchecked = "".join(runner.schedule.unchecked)
        assert unchecked.startswith(reason) and bool(unchecked) == bool(reason), (name, unchecked)
        assert len(runner.checked) == (number + (style == "fully_shard") if not reason else number), name
        text = compiled.plan.explain()
        counted = f"{len(runner.checked)} calls of {runner.name} checked against the step on a full copy"
        assert f"{counted}, {sum(runner.checked):,}" in text
        counts[name] = sum(runner.checked)
        compiled.release()
    assert len(counts) == len(names) >= len(PATTERNS) // 3 > 9
    assert min(count for name, count in counts.items() if name not in UNCHECKED) > 100


def _scheduled(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def _hooked(model: Any, optimizer: Any) -> None:
    model[0].register_forward_hook(lambda module, args, output: output * 1.1)


def _reloaded(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a learning rate": _scheduled,
    "a mode": lambda model, optimizer: model.eval(),
    "a frozen parameter": lambda model, optimizer: model[0].weight.requires_grad_(False),
    "a hook": _hooked,
    "an attribute": lambda model, optimizer: setattr(model, "scale", 2.0),
    "values": _reloaded,
    "state": lambda model, optimizer: optimizer.state.clear(),
}


class Scaled(nn.Sequential):
    scale = 1.0

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_what_a_caller_changes_between_calls_is_compared(ranks: Ranks, style: Any) -> None:
    """A copy that was kept from call to call missed it, and raised in the second call of a scheduled step."""
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        model = Scaled(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compiled = _compiled(ranks, mse_step(model, optimizer), style)
        for call in range(4):
            compiled(*(x[:, :4] for x in _batch(call, ranks.rank)))
            if call < 2:
                change(model, optimizer)
        runner = runner_of(compiled)
        assert not runner.schedule.unchecked, name
        assert len(runner.checked) == 2 + (style == "fully_shard"), name
        compiled.release()


def _doubled(self: Any, bucket: Any, flat: torch.Tensor, *more: Any) -> set[int]:
    return REAL_UNPACK(self, bucket, flat * (2 if 1 in bucket.members else 1), *more)


def _own(self: Any, *message: Any) -> set[int]:
    return set()  # each rank keeps its gradients


def _shifted(*args: Any) -> dict[str, nn.Parameter]:
    parameters = REAL_SHARD(*args)
    with torch.no_grad():
        last: Any = list(parameters.values())[-1]
        last._local_tensor.add_(1e-4 * (dist.get_rank() == 1))
    return parameters


def _without_state(reach: Any, *args: Any) -> dict[str, nn.Parameter]:
    parameters = REAL_SHARD(reach, *args)
    for state in (state for optimizer in reach.optimizers for state in optimizer.state.values()):
        state["momentum_buffer"]._local_tensor.zero_()
    return parameters


REAL_UNPACK, REAL_SHARD, REAL_COPY = GradientReducer._unpack, shard, copy_step
PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a bucket twice as large": (GradientReducer, "_unpack", _doubled, "replicate"),
    "no average": (GradientReducer, "_unpack", _own, "replicate"),
    "another value in a shard": (step, "shard", _shifted, "fully_shard"),
    "state of an optimizer lost on the way into shards": (step, "shard", _without_state, "fully_shard"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_raises_on_all_ranks(ranks: Ranks, name: str) -> None:
    owner, attribute, mistake, style = PLANTED[name]
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    compiled = _compiled(ranks, mse_step(model, optimizer), style, bucket_mb=0.0001)
    with patch.object(owner, attribute, mistake), pytest.raises(dp.PlanError) as caught:  # noqa: PT012
        for call in range(2):
            compiled(*_batch(call, ranks.rank))
    assert caught.value.problems[0].code in ("check-mismatch", "ranks-diverge")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["Snapshot", "copy_step"])
def test_a_mismatch_is_raised_on_all_ranks_where_one_has_no_memory_for_a_spread(ranks: Ranks, what: str) -> None:
    """The spread of right runs takes two snapshots, then a copy for each run; two copies are the check's own."""
    real = getattr(checked_call, what)
    for fails_at in (1, 2) if what == "Snapshot" else (3, 4):
        done = 0

        def limited(*args: Any, fails_at: int = fails_at) -> Any:
            nonlocal done
            done += 1
            if done == fails_at and ranks.rank == 1:
                raise MemoryError("of the test")
            return real(*args)

        torch.manual_seed(0)
        model = mlp()
        step = mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        compiled = _compiled(ranks, step, "replicate", bucket_mb=0.0001)
        with (
            patch.object(GradientReducer, "_unpack", _doubled),
            patch.object(checked_call, what, limited),
            pytest.raises(dp.PlanError) as caught,
        ):
            compiled(*_batch(0, ranks.rank))
        assert caught.value.problems[0].code == "check-mismatch"
        assert done >= fails_at


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_second_run_leaves_nothing_behind(ranks: Ranks, style: Any) -> None:
    """Counters, lists, random numbers and left gradients, and what the caller changes between calls."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    log: list[float] = []
    scale = [1.0]

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = scale[0] * F.mse_loss(model(x + 0.1 * torch.rand_like(x)), y)
        loss.backward()
        log.append(loss.item())
        if len(log) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    compiled = _compiled(ranks, train, style)
    for call in range(5):
        scale[0] = 1.0 + call
        torch.manual_seed(7)
        compiled(*_batch(call, ranks.rank))
    assert len(log) == 5
    runner = runner_of(compiled)
    assert len(runner.checked) == 2 + runner.eager.is_sharded and not runner.schedule.unchecked
    torch.manual_seed(7)
    torch.rand(4, WIDTH, dtype=torch.float64)
    expected = torch.rand(1)
    torch.manual_seed(7)
    compiled(*_batch(5, ranks.rank))
    assert torch.equal(torch.rand(1), expected)  # as many draws as one run has


@pytest.mark.ranks(2)
def test_what_cannot_run_twice_on_one_rank_runs_once_on_all(ranks: Ranks) -> None:
    for own in ([1.0], iter([1.0] * 9), random.SystemRandom()):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = own if ranks.rank else [1.0]

        def train(
            x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer, held: Any = held
        ) -> Any:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item() if held else None

        compiled = _compiled(ranks, train, "replicate")
        compiled(*_batch(0, ranks.rank))
        compiled(*_batch(1, ranks.rank))
        runner = runner_of(compiled)
        is_once = not isinstance(own, list)
        assert len(runner.checked) == (0 if is_once else 2)
        assert ("would be seen" in compiled.plan.explain()) == is_once


@pytest.mark.ranks(2)
def test_unchecked_by_choice(ranks: Ranks) -> None:
    for settings, reason in (({"check": "never"}, "check='never'"), ({"observe": False}, "observe=False")):
        torch.manual_seed(0)
        function, trained = PATTERNS["item_kept_in_a_meter"]()
        compiled = _compiled(ranks, function, "fully_shard", **settings)
        compiled(*_batch(0, ranks.rank))
        assert (
            f"0 calls of step checked against the step on a full copy, 0 elements; unchecked: {reason}"
            in compiled.plan.explain()
        )
        assert any(isinstance(one, DTensor) for one in trained())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_rounding_of_a_call_is_no_difference_of_the_next(ranks: Ranks, style: Any) -> None:
    """On three ranks averages in half precision round in other ways; second moments keep that."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
        optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)

        def train(x: torch.Tensor, y: torch.Tensor, parts: Any = (model, optimizer)) -> float:
            model, optimizer = parts
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.bfloat16()).float(), y.float())
            loss.backward()
            optimizer.step()
            return loss.item()

        warnings.simplefilter("ignore")
        compiled = dp.distribute(train, mesh=ranks.mesh((3,), ("dp",)), style=style)
        for call in range(3):
            compiled(*_batch(seed * 10 + 3 * call, ranks.rank))
        runner = runner_of(compiled)
        assert len(runner.checked) == 2 + runner.eager.is_sharded and runner.checked[0] > 300


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_model_that_grows_after_the_first_call_is_compared(ranks: Ranks, style: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    compiled = _compiled(ranks, mse_step(model, optimizer), style)
    compiled(*_batch(0, ranks.rank))
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": list(model[1].parameters())})
    losses = [compiled(*_batch(0, ranks.rank)) for _ in range(4)]
    runner = runner_of(compiled)
    assert len(runner.checked) == 2 + runner.eager.is_sharded and not runner.schedule.unchecked
    assert len(runner.eager.parameters) == 4 and losses[-1] < losses[0]


@pytest.mark.ranks(4)
def test_shards_and_replicas_are_compared(ranks: Ranks) -> None:
    warnings.simplefilter("ignore")
    for name in ("item_kept_in_a_meter", "trainer_object"):
        torch.manual_seed(0)
        function, trained = PATTERNS[name]()
        mesh = ranks.mesh((2, 2), ("replica", "shard"))
        compiled = dp.distribute(function, mesh=mesh, style="hybrid")
        for call in range(3):
            compiled(*_batch(call, ranks.rank))
        runner = runner_of(compiled)
        assert len(runner.checked) == 3 and min(runner.checked) > 100
        assert all(isinstance(one, DTensor) for one in trained())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_buffers_of_odd_layouts_raise_nothing(ranks: Ranks, style: Any) -> None:
    """An adjacency matrix without its zeros, positions that share one row, an empty cache."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 3)).double()
    model.register_buffer("adjacency", torch.eye(4, dtype=torch.float64).to_sparse())
    model.register_buffer("positions", torch.arange(3, dtype=torch.float64).expand(4, 3))
    model.register_buffer("cache", torch.empty(0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor, y: torch.Tensor, parts: Any = (model, optimizer)) -> float:
        model, optimizer = parts
        optimizer.zero_grad()
        loss = F.mse_loss(torch.sparse.mm(model.adjacency, model(x)) + model.positions, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    compiled = _compiled(ranks, train, style)
    losses = [compiled(*_batch(0, ranks.rank)) for _ in range(4)]
    runner = runner_of(compiled)
    assert losses[-1] < losses[0]
    assert len(runner.checked) == 2 + runner.eager.is_sharded, runner.schedule.unchecked


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_copy_that_fails_on_one_rank_leaves_the_call_unchecked_on_all(ranks: Ranks, fails_at: int) -> None:
    """The first copy is that of the live step, the second one runs: no rank waits in an average of the other's."""
    torch.manual_seed(0)
    model = mlp()
    compiled = _compiled(ranks, mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), "replicate")
    copies = 0

    def copy(*args: Any) -> Any:
        nonlocal copies
        copies += 1
        if copies == fails_at and ranks.rank == 1:
            raise MemoryError("of the test")
        return REAL_COPY(*args)

    with patch.object(checked_call, "copy_step", copy):
        losses = [compiled(*_batch(0, ranks.rank)) for _ in range(4)]
    runner = runner_of(compiled)
    assert not runner.checked and "of the test" in runner.schedule.unchecked[0]
    assert copies == (1 if fails_at == 1 else 2) and losses[-1] < losses[0]


@pytest.mark.ranks(2)
def test_expanded_buffers_get_the_first_ranks_values_and_sparse_ones_are_compared(ranks: Ranks) -> None:
    for kind in ("expanded", "sparse alike", "sparse apart"):
        torch.manual_seed(0)
        model = mlp()
        own = torch.arange(3, dtype=torch.float64) + (ranks.rank if kind != "sparse alike" else 0)
        model.register_buffer("own", own.expand(4, 3) if kind == "expanded" else torch.diag(own).to_sparse())
        compiled = _compiled(ranks, mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), "replicate")
        if kind == "sparse apart":
            with pytest.raises(dp.PlanError) as caught:
                compiled(*_batch(0, ranks.rank))
            assert {problem.code for problem in caught.value.problems} == {"ranks-disagree"}
            continue
        compiled(*_batch(0, ranks.rank))
        values = torch.arange(3, dtype=torch.float64)
        expected = values.expand(4, 3) if kind == "expanded" else torch.diag(values)
        assert torch.equal(model.get_buffer("own").to_dense(), expected) and expected.numel() >= 9


@pytest.mark.ranks(2)
def test_a_copy_that_fails_on_one_rank_without_a_word(ranks: Ranks) -> None:
    """`MemoryError` has no text, and the other rank has to hear of it all the same."""

    class Heavy:
        def __reduce__(self) -> Any:
            raise MemoryError if ranks.rank == 1 else TypeError("not copied")

    torch.manual_seed(0)
    model = mlp()
    step = mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def with_cache(x: torch.Tensor, y: torch.Tensor, cache: Any) -> Any:
        return step(x, y)

    for cache in (Heavy(), Heavy() if ranks.rank == 1 else None):
        compiled = _compiled(ranks, with_cache, "replicate")
        for call in range(3):
            compiled(*_batch(call, ranks.rank), cache)
        runner = runner_of(compiled)
        assert not runner.checked and runner.schedule.unchecked
        compiled.release()
