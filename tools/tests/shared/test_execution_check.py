"""The core of the check by execution: planted mistakes are measured, right runs are not."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.execution_check import Compared, Precision, RandomState, is_random, random_state_restored, relative_error

State = dict[str, torch.Tensor]
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def _train(dtype: torch.dtype, plant: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None) -> State:
    """Five steps of a small model with dropout and a running statistic; ``plant`` spoils it before each update."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = torch.randn(5, 12, 6, generator=torch.Generator().manual_seed(5)).to(dtype)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if plant is not None:
            plant(model, optimizer)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _weight(model: nn.Module) -> nn.Parameter:
    weight = model.get_parameter("0.weight")
    assert weight.grad is not None
    return weight


def _sum_for_mean(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def _rows_swapped(model: nn.Module, _: torch.optim.Optimizer) -> None:
    weight = _weight(model)
    weight.grad = torch.roll(weight.grad, 1, 0) if weight.grad is not None else None


def _one_shard_left_out(model: nn.Module, _: torch.optim.Optimizer) -> None:
    weight = _weight(model)
    assert weight.grad is not None
    weight.grad[8:].zero_()


def _one_row_slightly_off(model: nn.Module, _: torch.optim.Optimizer) -> None:
    weight = _weight(model)
    assert weight.grad is not None
    weight.grad[0].mul_(1.01)


def _stale_statistic(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.get_buffer("1.running_mean").zero_()


def _one_more_draw(model: nn.Module, _: torch.optim.Optimizer) -> None:
    torch.rand(1)


def _momentum_lost(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


PLANTS = [
    _sum_for_mean,
    _rows_swapped,
    _one_shard_left_out,
    _one_row_slightly_off,
    _stale_statistic,
    _one_more_draw,
    _momentum_lost,
]


def _errors(got: State, want: State, before: State, compared: Compared) -> dict[str, float]:
    for value in want.values():
        compared.add(value)
    return {name: relative_error(got[name], want[name], before=before[name]) for name in want}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_planted_mistake_is_measured_and_no_right_run(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, 3)).to(dtype)
    before, want, compared = dict(start.state_dict()), _train(dtype), Compared()
    hits = {plant.__name__: max(_errors(_train(dtype, plant), want, before, compared).values()) for plant in PLANTS}
    missed = [name for name, error in hits.items() if error <= LIMITS[dtype]]
    assert not missed, hits
    assert max(_errors(_train(dtype), want, before, compared).values()) == 0.0
    assert compared.tensors == (len(PLANTS) + 1) * len(want)
    assert compared


def test_another_order_of_sums_is_no_error() -> None:
    generator = torch.Generator().manual_seed(1)
    worst: dict[torch.dtype, float] = {}
    for dtype, limit in LIMITS.items():
        for _ in range(50):
            x = torch.randn(64, 33, generator=generator).to(dtype)
            error = relative_error(x.flip(0).sum(0), x.sum(0))
            worst[dtype] = max(worst.get(dtype, 0.0), error)
        assert worst[dtype] <= limit, worst


def test_what_no_number_measures() -> None:
    nan, one = torch.tensor([math.nan, 1.0]), torch.ones(2)
    rows = {
        "not-a-number for a number": (one, nan),
        "a number for not-a-number": (nan, one),
        "zero for not-a-number": (torch.tensor([0.0, 1.0]), nan),
        "the other infinity": (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        "another shape": (torch.ones(2, 1), one),
        "another dtype": (one.double(), one),
        "something for zeros": (one, torch.zeros(2)),
    }
    assert {name: relative_error(got, want) for name, (got, want) in rows.items()} == dict.fromkeys(rows, math.inf)
    rights = [(nan, nan), (one, one.clone()), (torch.empty(0, 3), torch.empty(0, 3)), (torch.zeros(2), torch.zeros(2))]
    assert [relative_error(got, want) for got, want in rights] == [0.0] * 4
    assert relative_error(one.double(), one, any_dtype=True) == 0.0
    assert relative_error(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == pytest.approx(1 / math.sqrt(2))
    assert relative_error(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 2.0]), norm=math.inf) == 0.25


def test_noise_and_rounding_of_a_large_value_are_no_error() -> None:
    before = torch.tensor([1024.0])
    want = before + 1e-3
    got = torch.nextafter(want, torch.tensor([2000.0]))
    assert relative_error(got, want, before=before) == 0.0
    assert relative_error(want + 1e-2, want, before=before) > 1
    assert relative_error(torch.tensor([1e-9]), torch.tensor([0.0]), floor=1e-2) == pytest.approx(1e-7)
    assert relative_error(torch.tensor([1.01]), torch.tensor([1.0]), noise=0.02) == 0.0


def test_precision_is_that_of_operations_and_not_of_what_they_read() -> None:
    half = torch.randn(8, 8).to(torch.bfloat16)
    with Precision() as copies:
        wide = half.clone().detach().t().to(torch.float64)
    assert copies.epsilon == 0.0  # nothing was rounded
    with Precision() as double:
        _ = (wide @ wide).relu().sum()
    assert double.epsilon == torch.finfo(torch.float64).eps
    with Precision() as inner:  # a norm that computes in float32 inside of a run in float64
        _ = (wide @ wide).float().rsqrt().double()
    assert inner.epsilon == torch.finfo(torch.float32).eps
    with Precision() as coarse:
        _ = half @ half
    assert coarse.epsilon == torch.finfo(torch.bfloat16).eps


def test_generators_come_back() -> None:
    numpy = pytest.importorskip("numpy") if "numpy" in sys.modules else None
    own = torch.Generator().manual_seed(7)

    def draw() -> list[float]:
        values = [float(torch.rand(())), random.random(), float(torch.rand((), generator=own))]
        return [*values, float(numpy.random.rand())] if numpy is not None else values

    before = RandomState([own])
    with random_state_restored([own]) as state:
        first = draw()
        after = RandomState([own])
        assert not state.equals(after)
    assert before.equals(RandomState([own]))
    assert draw() == first
    before.restore()
    assert draw() == first
    assert after.equals(RandomState([own]))


def test_operators_that_draw() -> None:
    aten, x = torch.ops.aten, torch.ones(3)
    assert is_random(aten.bernoulli.default, (x,), {})
    assert is_random(aten.native_dropout.default, (x, 0.5, True), {})
    assert not is_random(aten.native_dropout.default, (x, 0.0, True), {})
    assert not is_random(aten.mm.default, (x, x), {})


def test_nothing_compared_is_not_equal() -> None:
    compared = Compared()
    assert not compared
    compared.add(torch.empty(0))
    assert not compared
    compared.add(torch.ones(2, 1500), gradient=True)
    assert compared
    assert str(compared) == "1 tensors and 1 gradients, 3,000 elements"
