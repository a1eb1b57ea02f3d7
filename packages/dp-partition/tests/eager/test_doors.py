"""Two doors: `distribute` runs every step, `compile` makes one a graph or refuses it; both train as in one process."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import numpy as np
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from dp_partition.eager.step import EagerStep
from dp_step_patterns import PATTERNS, WIDTH
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

Step = Callable[..., Any]
CALLS = 6
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)  # traced in less than half the time of AdamW
RADAM = partial(torch.optim.RAdam, lr=1e-2)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def finish(optim: Any, loss: Any) -> Any:
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def scaled_by(factor: Callable[[], Any]) -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return finish(optim, (model(x) - y).square().mean() * factor())

    return step


def plain() -> Step:
    return scaled_by(lambda: 1.0)


def branching() -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (model(x) - y).square().mean()
        return finish(optim, loss) if torch.isfinite(loss) else loss

    return step


def counting() -> Step:
    calls = 0

    def factor() -> float:
        nonlocal calls
        calls += 1
        return 1 / calls

    return scaled_by(factor)


class Decay:
    """A counter that no code of the step names."""

    def __init__(self) -> None:
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1 / self.calls


def accumulating() -> Step:
    losses: list[torch.Tensor] = []

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if len(losses) % 2 == 0:
            optim.step()
            optim.zero_grad()
        return loss

    return step


def counting_in_a_tensor() -> Step:
    calls = torch.zeros((), dtype=torch.float64)
    return scaled_by(lambda: 1 / calls.add_(1))


def scheduling() -> Step:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optim.param_groups[0]["lr"] *= 0.9
        return finish(optim, (model(x) - y).square().mean())

    return step


# how the step is made, its optimizer, and whether it may be a graph
STEPS: dict[str, tuple[Callable[[], Step], Any, bool]] = {
    "plain": (plain, ADAMW, True),
    "a counter in a tensor": (counting_in_a_tensor, ADAMW, True),
    "RAdam": (plain, RADAM, False),
    "a branch on the loss": (branching, ADAMW, False),
    "a counter": (counting, ADAMW, False),
    "a counter of an object": (lambda: scaled_by(Decay().factor), ADAMW, False),
    "a private generator": (lambda: scaled_by(random.Random(0).random), ADAMW, False),
    "NumPy's generator": (lambda: scaled_by(np.random.default_rng(0).random), ADAMW, False),
    "an iterator": (lambda: scaled_by(iter([1.0, 0.5, 2.0, 0.1, 3.0, 1.5]).__next__), ADAMW, False),
    "accumulation over calls": (accumulating, ADAMW, False),
    "a learning rate changed inside": (scheduling, ADAMW, True),
}


def batch(call: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(call)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
@pytest.mark.parametrize("style", ["replicate", "fully_shard", "zero1"])
def test_every_step_trains_as_in_one_process_or_is_refused(ranks: Ranks, style: Any, door: Any) -> None:
    rank, refused = ranks.rank, set()
    if door is dp.distribute and style == "zero1":
        with pytest.raises(dp.PlanError, match=r"zero1 -> .*dp_partition.compile has the other styles"):
            door(plain(), mesh=ranks.mesh((2,), ("dp",)), style=style)
        return
    for name, (make, optimizer, _) in STEPS.items():
        with models.case(name):
            reference, model = models.seeded(mlp), models.seeded(mlp)
            theirs, own = optimizer(reference.parameters()), optimizer(model.parameters())
            plain_step, step = make(), door(make(), mesh=ranks.mesh((2,), ("dp",)), style=style)
            for call in range(CALLS):
                x, y = batch(call, 8)
                plain_step(reference, theirs, x, y)
                mine = slice(4 * rank, 4 * rank + 4)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        step(model, own, x[mine], y[mine])
                except dp.PlanError as error:
                    text = str(error)
                    assert call == 0 or name == "accumulation over calls", "nothing was placed before the refusal"
                    assert "dp_partition.distribute" in text or "rank-failed" in text, text
                    assert ".py:" in text or "rank-failed" in text, text
                    refused.add(name)
                    break
            if name in refused:
                continue
            step.release()
            compared = 0
            for got, want in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
                compared += got.numel()
            assert compared == 6 * 8 + 8 + 8 * 5 + 5 + 5 * 3 + 3
    expected = {name for name, (_, _, is_graph) in STEPS.items() if not is_graph}
    assert refused == (expected if door is dp.compile else set())


def in_a_closure(model: nn.Module, optim: Any) -> Step:
    return lambda x, y: finish(optim, (model(x) - y).square().mean())


def in_self(model: nn.Module, optim: Any) -> Step:
    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": model, "optim": optim}

        def update(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return finish(self.parts["optim"], (self.parts["model"](x) - y).square().mean())

    return Trainer().update


def of_globals(x: torch.Tensor, y: torch.Tensor) -> Any:
    return finish(GLOBAL_OPTIM, (GLOBAL_MODEL(x) - y).square().mean())  # type: ignore[name-defined] # noqa: F821


def in_globals(model: nn.Module, optim: Any) -> Step:
    globals().update(GLOBAL_MODEL=model, GLOBAL_OPTIM=optim)
    return of_globals


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_models_past_the_arguments_run_as_a_graph(ranks: Ranks, style: Any) -> None:
    """Copied for the check as well: the live model is not the one that the reference trains."""
    checked = 0
    for make in (in_a_closure, in_self, in_globals):
        with models.case(make.__name__):
            reference, model = models.seeded(mlp), models.seeded(mlp)
            theirs, own = ADAMW(reference.parameters()), ADAMW(model.parameters())
            batches = [batch(call, 8) for call in range(CALLS)]
            plain_step = make(reference, theirs)
            for x, y in batches:
                plain_step(x, y)
            # Of a step under `torch.compile` the original is traced.
            function: Any = make(model, own) if make is in_self else torch.compile(make(model, own), backend="eager")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step = dp.compile(function, mesh=ranks.mesh((2,), ("dp",)), style=style)
            assert len(caught) == (make is not in_self and ranks.rank == 0)  # one warning a job
            mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
            for x, y in batches:
                step(x[mine], y[mine])
            assert step.num_traces == 1 and len(step.plan.params) == 6
            checked += runner_of(step).schedule.num_checked
            step.release()
            for got, want in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert checked >= 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_length", [False, True])
def test_a_step_of_new_values_in_each_call_warns(ranks: Ranks, is_length: bool) -> None:
    """A trace for each value or length; one warning after eight of them."""
    weight, model = [1.0], models.seeded(mlp)
    compiled = dp.compile(scaled_by(partial(max, weight)), mesh=ranks.mesh((2,), ("dp",)))
    own = torch.optim.SGD(model.parameters(), lr=1e-2)
    with models.warns_once(ranks, "was traced 9 times"):
        for call in range(11):
            weight[0] = 1.0 if is_length else 1 / (call + 1)
            compiled(model, own, *batch(2 * call + ranks.rank, 4 + call * is_length))


@pytest.mark.ranks(2)
def test_models_past_the_arguments_where_numbers_are_kept(ranks: Ranks) -> None:
    """Steps of tutorials, with models in closures; all of them in `test_eager_step`."""
    for name in ("item_kept_in_a_meter", "trainer_object"):
        torch.manual_seed(1)
        reference, expected = PATTERNS[name]()
        torch.manual_seed(1)
        step, trained = PATTERNS[name]()
        compiled = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
        for call in range(CALLS):
            x, y = batch(call, 8)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Converting a tensor")  # the step's own; nothing stays full
                reference(x, y)
                compiled(x[4 * ranks.rank : 4 * ranks.rank + 4], y[4 * ranks.rank : 4 * ranks.rank + 4])
        compiled.release()
        for got, want in zip(trained(), expected(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_scheduler_in_the_step_is_stepped_in_each_call(ranks: Ranks, style: Any) -> None:
    """No learning rate is another one in the calls that are checked, and no code of the step names the counter."""
    runs = []
    for rows in (slice(0, 8), slice(4 * ranks.rank, 4 * ranks.rank + 4)):
        model = models.seeded(mlp)
        optim = ADAMW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optim, 4, 0.1)

        def step(x: torch.Tensor, y: torch.Tensor, own: Any = (model, optim, schedule)) -> Any:
            loss = finish(own[1], (own[0](x) - y).square().mean())
            own[2].step()
            return loss

        called: Any = (
            step
            if rows.stop == 8 and rows.start == 0
            else dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in range(CALLS):
                x, y = batch(call, 8)
                called(x[rows], y[rows])
        if isinstance(called, dp.DistributedStep):
            called.release()
        runs.append([*model.parameters(), torch.tensor(optim.param_groups[0]["lr"]), torch.tensor(schedule.last_epoch)])
    assert runs[0][-2:] == [torch.tensor(1e-3), torch.tensor(CALLS)]
    for want, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_a_door_does_what_its_name_says(ranks: Ranks) -> None:
    mesh, rank = ranks.mesh((2,), ("dp",)), ranks.rank
    x, y = batch(0, 8)
    rows = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
    model = models.seeded(mlp)
    with pytest.raises(dp.PlanError, match="not-traceable") as caught:
        dp.compile(branching(), mesh=mesh)(model, ADAMW(model.parameters()), *rows)
    text = str(caught.value)
    assert f"{__file__}:" in text and "isfinite(loss)" in text and "dp_partition.distribute" in text, text
    assert type(next(model.parameters())) is nn.Parameter
    with pytest.raises(dp.PlanError, match="not-traceable") as caught:  # `distribute` has no micro-batches
        dp.compile(branching(), mesh=mesh, accumulate=2)(model, ADAMW(model.parameters()), *rows)
    assert "dp_partition.distribute" not in str(caught.value)
    with pytest.raises(dp.PlanError) as caught:
        dp.distribute(model, mesh=ranks.mesh((2, 1), ("a", "b")), full="no", check="often", reduce_dtype=torch.int8)  # type: ignore[call-overload]
    assert sorted(problem.name for problem in caught.value.problems) == [
        "check", "full", "mesh", "reduce_dtype", "train_step"
    ]  # fmt: skip
    model = models.seeded(mlp)  # frames of the errors above hold the first one's parameters
    step = dp.distribute(plain(), mesh=mesh)
    with pytest.raises(dp.PlanError, match="not-sharded"):
        _ = step.plan
    optim = ADAMW(model.parameters())
    for _ in range(2):
        step(model, optim, *rows)
    eager = runner_of(step).eager
    assert isinstance(eager, EagerStep) and eager.num_calls == 2
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert [str(param.param) for param in step.plan.params] == ["S(0)"] * 6
    with torch.no_grad():
        total: Any = model(x).sum()
    with step.unsharded():
        assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
        torch.testing.assert_close(model(x).sum(), total)
    step.release()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.testing.assert_close(model(x).sum(), total)


def looks(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, call: int) -> Any:
    loss = (model(x) - y).square().mean()
    return finish(optim, loss) if call != 3 or torch.isfinite(loss) else loss


def adds_a_group(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor, call: int) -> Any:
    if call == 3:
        optim.add_param_group({"params": list(model[0].requires_grad_(True).parameters()), "lr": 0.05})
    return finish(optim, (model(x) - y).square().mean())


def evaluates(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, call: int) -> Any:
    loss = (model(x) - y).square().mean()
    return finish(optim, loss) if optim is not None else loss


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("function", [looks, adds_a_group, evaluates])
def test_a_later_call_that_does_something_else(ranks: Ranks, style: Any, door: Any, function: Any) -> None:
    """A look at the loss, a new group, an evaluation: in call 4 alone. A graph raises, on all ranks, and goes on."""
    refused = 3 if door is dp.compile and function is not evaluates else None
    warnings.simplefilter("ignore")
    reference, model = models.seeded(mlp), models.seeded(mlp)
    for one in (reference, model):
        one.get_submodule("0").requires_grad_(function is not adds_a_group)
    theirs, own = (MOMENTUM([p for p in one.parameters() if p.requires_grad]) for one in (reference, model))
    step = door(function, mesh=ranks.mesh((2,), ("dp",)), style=style)
    for call in range(CALLS):
        x, y = batch(call, 8)
        mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        ends = function is evaluates and call == 3
        if call == refused:
            with pytest.raises(dp.PlanError, match=r"dp_partition.distribute"):
                step(model, own, x[mine], y[mine], call)
            continue
        function(reference, None if ends else theirs, x, y, call)
        step(model, None if ends else own, x[mine], y[mine], call)
    step.release()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2, timeout=120)
def test_ranks_that_fail_in_different_ways_raise_together(ranks: Ranks) -> None:
    """One rank's trace fails in a call that all ranks trace: what it did to Python on that rank is put back."""
    counts: list[int] = []

    def step_of(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, call: int) -> Any:
        loss = (model(x) - y).square().mean()
        if call == 3:
            counts.append(call)
        if call == 3 and ranks.rank and loss > 1e9:
            return loss
        return finish(optim, loss)

    model = models.seeded(mlp)
    step, own = dp.compile(step_of, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard"), ADAMW(model.parameters())
    for call in range(CALLS):
        if call == 3:
            with pytest.raises(dp.PlanError, match=r"not-traceable|python-state|rank-failed"):
                step(model, own, *batch(2 * call + ranks.rank, 4), call)
            continue
        step(model, own, *batch(2 * call + ranks.rank, 4), call)
    assert counts == []


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


@pytest.mark.ranks(2)
def test_tensors_in_slots_are_never_constants(ranks: Ranks) -> None:
    def step(model: nn.Module, optim: Any, inputs: Slotted) -> Any:
        return finish(optim, (model(inputs.x) - inputs.y).square().mean())

    model, plain_model = models.seeded(mlp), models.seeded(mlp)
    optim, plain_optim, inputs = ADAMW(model.parameters()), ADAMW(plain_model.parameters()), Slotted(*batch(0, 4))
    mesh = ranks.mesh((2,), ("dp",))
    with pytest.raises(dp.PlanError, match="unsupported-argument"):
        dp.compile(step, mesh=mesh, style="replicate", check="never")(model, optim, inputs)
    compiled = dp.distribute(step, mesh=mesh, style="replicate", check="never")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            inputs.x, inputs.y = batch(call, 4)  # the same object, other tensors
            assert torch.equal(compiled(model, optim, inputs), step(plain_model, plain_optim, inputs))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Random", "RandomState", "default_rng"])
def test_a_draw_of_ones_own_is_python_state_whatever_comes_of_it(ranks: Ranks, kind: str) -> None:
    """Two checked calls may take the same branch by chance; the generator tells."""
    import numpy

    own: Any = random.Random(0) if kind == "Random" else getattr(numpy.random, kind)(0)

    def step(model: nn.Module, optim: Any, x: torch.Tensor) -> torch.Tensor:
        wide = own.random_sample() if kind == "RandomState" else own.random()
        return torch.as_tensor(finish(optim, model(x * 2 if wide < 2 else x).square().mean()))

    model = models.seeded(mlp)
    compiled = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    with pytest.raises(dp.PlanError, match="a random generator"):
        compiled(model, ADAMW(model.parameters()), batch(0, 8)[0])


@pytest.mark.ranks(2)
def test_a_second_text_is_named_at_its_trace(ranks: Ranks) -> None:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, *, tag: str) -> Any:
        return finish(optim, (model(x) - y).square().mean())

    model = models.seeded(mlp)
    optim = ADAMW(model.parameters())
    compiled = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style="replicate", check="first")
    compiled(model, optim, *batch(0, 4), tag="one")
    with models.warns_once(ranks, "traced again for argument tag, 'one' and then 'two'"):
        compiled(model, optim, *batch(1, 4), tag="two")


@pytest.mark.ranks(2)
def test_shards_before_the_first_call(ranks: Ranks) -> None:
    model, plain_model = models.seeded(mlp), models.seeded(mlp)
    optim, plain_optim = ADAMW(model.parameters()), ADAMW(plain_model.parameters())
    kinds: list[type] = []

    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        kinds.append(type(next(model.parameters())))
        loss = (model(x) - y).square().mean()
        return finish(optim, loss) if torch.isfinite(loss) else loss

    def reads_outside(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return finish(
            optim, (model(x) - y).square().mean() + (model.get_parameter("0.weight") * torch.ones(8, WIDTH)).sum()
        )

    mesh = ranks.mesh((2,), ("dp",))
    compiled = dp.distribute(step, mesh=mesh, style="fully_shard", observe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            x, y = batch(call, 8)
            compiled(model, optim, x[4 * ranks.rank :][:4], y[4 * ranks.rank :][:4])
            step(plain_model, plain_optim, x, y)
        assert kinds[0] is DTensor, "the first call runs on shards"
        assert "sharded: 6 of 6" in compiled.plan.checks
        compiled.release()
        for got, want in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-11)
        refused = dp.distribute(reads_outside, mesh=mesh, style="fully_shard", observe=False)
        with pytest.raises(RuntimeError, match="mixed torch"):
            refused(model, optim, *batch(0, 8))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_parameters_in_a_list_beside_the_model(ranks: Ranks, style: Any) -> None:
    """A graph would replace them in the model alone, and no call would work."""
    torch.manual_seed(0)
    model = mlp()
    one = copy.deepcopy(model)

    def step(model: Any, optim: Any, clipped: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(clipped, 1e-2)
        optim.step()
        optim.zero_grad()

    compiled = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    optim, alone = ADAMW(model.parameters()), ADAMW(one.parameters())
    clipped, reference = list(model.parameters()), list(one.parameters())
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    for _ in range(CALLS):
        x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (WIDTH, 3))
        mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        compiled(model, optim, clipped, x[mine], y[mine])
        step(one, alone, reference, x, y)
    compiled.release()
    with pytest.raises(dp.PlanError, match="parameters are among its arguments"):
        dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style=style)(model, optim, list(model.parameters()), x, y)
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(2)
def test_buffers_stay_each_ranks_own(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    statistics: Any = model[1]

    def step(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor, branches: bool) -> Any:
        loss = (model(x) - y).square().mean()
        return finish(optim, loss if not branches or loss > 0 else -loss)

    optim = ADAMW(model.parameters())
    compiled = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(ranks.rank)
    for call in range(CALLS):
        x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) + ranks.rank for size in (WIDTH, 3))
        with torch.no_grad():
            weights = [getattr(p, "_local_tensor", p) for p in model[0].parameters()]
            expected = 0.9 * statistics.running_mean + 0.1 * nn.functional.linear(x, *weights).mean(0)
        compiled(model, optim, x, y, call > 2)
        if call:
            torch.testing.assert_close(statistics.running_mean, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_torch_raises_no_false_alarm_around_a_step(ranks: Ranks, door: Any) -> None:
    """A linear layer of sequences returns a view, and a scheduler looks at the optimizer's step."""
    model = models.seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).double())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2)

    def step(model: nn.Module, optim: Any, x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called = door(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
        for call in range(4):
            generator = torch.Generator().manual_seed(2 * call + ranks.rank)
            called(model, optim, torch.randn(2, 3, 8, generator=generator, dtype=torch.float64))
            scheduler.step()
    assert [str(one.message) for one in caught] == []
    assert all(isinstance(p, DTensor) for p in model.parameters()) and optim.param_groups[0]["lr"] == 0.1 * 0.1**2
