"""Python values beside tensors: what a graph would burn in is refused, and what the errors advise is right."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import os
import random
import re
import sys
import types
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dp_models as models
import dp_partition as dp
import numpy as np
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.capture.fingerprint import FunctionReads, leaf_key
from dp_partition.capture.inputs import read_arguments
from python_effects import REFUSED, caching, collecting, counting, finish, mse, plain, python_draw, scheduled, seeded
from ranktest import Ranks
from torch import nn
from torch.nn import functional as F


def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.ranks(2)
def test_what_a_graph_would_leave_out_is_refused(ranks: Ranks) -> None:
    """Most while the step is traced; by the check of the first call what no fingerprint shows."""
    mesh = ranks.mesh((2,), ("dp",))
    for name, (make, code, words) in REFUSED.items():
        with models.case(name):
            model, optim = fresh()
            step = dp.compile(make(), mesh=mesh, style="fully_shard")
            with pytest.raises(dp.PlanError) as error:
                step(model, optim, torch.ones(4, 4), torch.zeros(4, 4))
            assert {problem.code for problem in error.value.problems} == {code}
            assert re.search(words, str(error.value))


@pytest.mark.ranks(2)
def test_a_refusal_leaves_everything_as_it_was(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    model, optim = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    numbers = random.getstate(), torch.get_rng_state()
    for make in (counting, lambda: python_draw, lambda: seeded, scheduled, collecting):
        with pytest.raises(dp.PlanError):
            dp.compile(make(), mesh=mesh, style="fully_shard")(model, optim, x, y)
    assert all(map(torch.equal, before, model.parameters())) and len(before) == 4
    assert optim.param_groups[0]["lr"] == 0.1 and not optim.state
    assert random.getstate() == numbers[0] and torch.equal(torch.get_rng_state(), numbers[1])
    step = dp.compile(plain, mesh=mesh, style="fully_shard")
    losses = [float(step(model, optim, x, y)) for _ in range(5)]
    assert losses[-1] < losses[0] and step.num_traces == 1


@pytest.mark.ranks(2)
def test_the_same_by_arguments_and_results(ranks: Ranks) -> None:
    """What the errors advise: random factors in a tensor, schedulers between steps, losses returned."""
    mesh = ranks.mesh((2,), ("dp",))

    def mixed(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> Any:
        loss = finish(mse(model(x * factor), y), optim)
        return loss, loss.item()  # a number may be returned

    drawn = [torch.tensor(random.Random(step).random()) for step in range(5)]
    generator = torch.Generator().manual_seed(ranks.rank)
    batches = [(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(5)]
    results = []
    for wrapped in (False, True):
        model, optim = fresh()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        step: Any = dp.compile(mixed, mesh=mesh) if wrapped else mixed
        used: Any = model if wrapped else nn.parallel.DistributedDataParallel(model)
        losses = []
        for (x, y), factor in zip(batches, drawn, strict=True):
            loss, number = step(used, optim, x, y, factor)
            assert float(loss.detach()) == number
            losses.append(number)
            schedule.step()
        if wrapped:
            assert step.num_traces == 1
            step.release()
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0] and len(set(results[0][0])) == 5
    assert sum(map(torch.equal, results[0][1], results[1][1])) == 4


def test_arguments_without_attributes_count_by_identity() -> None:
    one, other = torch.Generator(), torch.Generator()
    assert leaf_key(one) == leaf_key(one) != leaf_key(other)
    assert leaf_key([1, 2.0]) == leaf_key([1, 2.0]) != leaf_key([1, 2])
    assert leaf_key(True) != leaf_key(1) != leaf_key(1.0)


@pytest.mark.ranks(2)
def test_a_trace_leaves_no_fake_tensors_behind(ranks: Ranks) -> None:
    """A cache that the trace has filled is emptied, a tensor that it has written has its value, a failed one's too."""
    model, optim = fresh()
    plain_model, plain_optim = fresh()
    mesh, generator = ranks.mesh((2,), ("dp",)), torch.Generator().manual_seed(0)
    step = dp.compile(caching(), mesh=mesh, style="fully_shard")
    other = caching()
    for _ in range(3):
        x, y = torch.randn(2, 4, 4, generator=generator)
        loss, expected = step(model, optim, x, y), other(plain_model, plain_optim, x, y)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert step.plan.checks.startswith("2 of 3 calls")
    scaler, (model, optim) = torch.amp.GradScaler("cpu"), fresh()

    def scaled(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        scaler.scale(mse(model(x), y)).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()

    with pytest.raises(dp.PlanError, match="not-traceable"):
        dp.compile(scaled, mesh=mesh)(model, optim, x, y)
    scaled(model, optim, x, y)
    assert scaler.get_scale() == 65536.0, "nothing fake, and no state of the trace"


@pytest.mark.parametrize("levels", [0, 6])
def test_settings_count_at_every_level(levels: int) -> None:
    settings: Any = SimpleNamespace(inner=None, weight=1.0)
    nested: Any = settings
    for _ in range(levels):
        nested = SimpleNamespace(inner=nested)
    reads = FunctionReads(lambda: (nested, nested.inner.weight))
    first = leaf_key(nested), reads.read()
    assert (leaf_key(nested), reads.read()) == first and hash(first)
    settings.weight += 1
    assert leaf_key(nested) != first[0] and reads.read() != first[1]


def test_arrays_count_by_identity_and_are_no_arguments() -> None:
    array = np.ones(3)
    assert leaf_key([array]) == leaf_key([array]) != leaf_key([array.copy()])
    with pytest.raises(dp.PlanError, match=r"unsupported-argument.*torch.as_tensor"):
        read_arguments("step", (array,), {})


HELD = {"weight": 1.0}
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("weight", default=1.0)


@functools.lru_cache
def looked_up(key: str) -> float:
    return HELD[key]


def test_what_a_step_reads_from_any_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph went on with the first value where only types of these objects were compared."""
    recent, numbers, raw, table = collections.deque([1.0], maxlen=1), array.array("d", [1.0]), bytearray(1), np.ones(2)
    kind = np.float32  # a class is no array, though it has the attributes of one
    view, chain = types.MappingProxyType(HELD), collections.ChainMap({}, HELD)

    def forget() -> None:
        HELD["weight"] += 1.0
        looked_up.cache_clear()

    rescale, none = partial(HELD.update, weight=7.0), torch.zeros(2)
    places: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "context variable": (lambda: VARIABLE.get(), lambda: VARIABLE.set(3.0)),
        "environment": (lambda: os.environ["WEIGHT"], lambda: monkeypatch.setenv("WEIGHT", "1")),
        "getenv": (lambda: os.getenv("WEIGHT"), lambda: monkeypatch.setenv("WEIGHT", "2")),
        "deque": (lambda: recent[-1], lambda: recent.append(3.0)),
        "array": (lambda: numbers[0], lambda: numbers.append(3.0)),
        "bytes": (lambda: raw[0], lambda: raw.append(3)),
        "array of NumPy": (lambda: np.float64(table[0]) * kind(1), lambda: table.fill(3.0)),
        "view of a dict": (lambda: view["weight"], rescale),
        "chain of dicts": (lambda: chain["weight"], forget),
        "cached function": (lambda: looked_up("weight"), forget),
        "function of torch": (
            lambda: F.mse_loss(none, none),
            lambda: monkeypatch.setattr(F, "mse_loss", F.l1_loss),
        ),
        "its full name": (
            lambda: torch.nn.functional.huber_loss(none, none),
            lambda: monkeypatch.setattr(F, "huber_loss", F.l1_loss),
        ),
    }
    for name, (read, change) in places.items():
        reads = FunctionReads(read)
        first = reads.read()
        assert reads.read() == first and hash(first), name
        change()
        assert reads.read() != first, name
    assert len(places) == 12


def test_values_of_libraries_that_no_step_reads_do_not_count() -> None:
    """`sys.modules` grows with each import, and a step calls the method of a model that has its name."""
    model = nn.Linear(2, 2)
    reads = FunctionReads(lambda: (sys.version, list(model.modules())))
    first = reads.read()
    with patch.dict(sys.modules, {"imported_since": types.ModuleType("imported_since")}):
        assert reads.read() == first and len(first) < 50


class Settings:
    """Values by name, as in EasyDict: a name that is not there is a KeyError."""

    def __init__(self, **values: float) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> float:
        return float(self.__dict__["values"][name])

    def __reduce__(self) -> Any:
        return partial(Settings, **self.__dict__["values"]), ()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_settings_that_raise_key_errors(ranks: Ranks, door: Any) -> None:
    settings = Settings(weight=2.0)

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return finish(mse(model(x), y) * settings.weight, optim)

    called = door(step, mesh=ranks.mesh((1,), ("dp",)), style="fully_shard")
    (model, optim), (alone, other) = fresh(), fresh()
    for call in range(5):
        settings.__dict__["values"]["weight"] = 2.0 + (call > 2) * (door is dp.distribute)  # a constant of a graph
        x, y = torch.ones(4, 4), torch.zeros(4, 4)
        torch.testing.assert_close(called(model, optim, x, y), step(alone, other, x, y).detach())


class Scaler:
    """A step that reads through a method, a property and its class."""

    weight = 1.0

    def __init__(self) -> None:
        self.scale, self.shift, self.seen = 1.0, 0.0, [0.0]

    def factor(self) -> float:
        return self.scale

    @property
    def offset(self) -> float:
        return self.shift

    def step(self, x: float) -> float:
        return x * self.factor() * self.weight + self.offset


def test_methods_and_class_attributes_that_a_step_reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = Scaler()
    reads = FunctionReads(scaler.step)
    first = reads.read()
    scaler.seen.append(1.0)
    assert reads.read() == first, "no code of the step names it"
    for owner, name in ((scaler, "scale"), (scaler, "shift"), (Scaler, "weight")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, 3.0)
            assert reads.read() != first, name
        assert reads.read() == first
