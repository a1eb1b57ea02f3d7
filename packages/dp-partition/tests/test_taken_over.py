"""A caller's changes between two calls, and the results of a step, are kept by both doors: values equal one process."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

DOORS = [dp.distribute, dp.compile]
STYLES = ["replicate", "fully_shard"]


def made(seed: int = 0) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optim.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optim.step()
    model.zero_grad()  # of parameters that the optimizer does not have, too
    return loss.detach()


def batch(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(call)
    return torch.randn(8, 8, generator=generator).double(), torch.randint(4, (8,), generator=generator)


def head(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(16, 4).double()


def assigned(model: Any, optim: Any, seed: int) -> Any:
    model[2].load_state_dict(head(seed).state_dict(), assign=True)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def new_group(model: Any, optim: Any, seed: int) -> Any:
    model[2] = head(seed)
    optim.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    return optim


def new_optimizer(model: Any, optim: Any, seed: int) -> Any:
    model[2] = head(seed)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assigned_without_optimizer(model: Any, optim: Any, seed: int) -> Any:
    model[2].load_state_dict(head(seed).state_dict(), assign=True)
    return optim


def longer(model: Any, optim: Any, seed: int) -> Any:
    model.append(nn.Linear(4, 4).double())
    optim.add_param_group({"params": list(model[3].parameters())})
    return optim


def with_another_bias(model: Any, optim: Any, seed: int) -> Any:
    """After `without_bias` the bias was None in two calls. It is a tensor again, which no optimizer updates."""
    model[2].bias = nn.Parameter(torch.full((4,), 0.1 * seed).double())
    return optim


def without_bias(model: Any, optim: Any, seed: int) -> Any:
    model[2].bias = None
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def with_state(model: Any, optim: Any, seed: int) -> Any:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)  # it makes its state at once: of shards, in shards


CHANGES = [assigned, new_group, new_optimizer, assigned_without_optimizer, longer, without_bias, with_state]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("style", STYLES)
def test_what_a_caller_puts_in_place_is_taken_over(ranks: Ranks, style: Any, door: Any) -> None:
    """Also as several changes in a row, in an order drawn by seed."""
    warnings.simplefilter("ignore")
    dice = random.Random(3)
    orders = [[change] for change in CHANGES] + [dice.sample(CHANGES[:3], 2) for _ in range(2)]
    orders.append([without_bias, with_another_bias])
    for order in orders:
        (model, optim), (plain, alone) = made(), made()
        step = door(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
        for call in range(2 + 2 * len(order)):
            if call >= 2 and call % 2 == 0:
                change = order[call // 2 - 1]
                torch.manual_seed(call)
                optim = change(model, optim, call)
                torch.manual_seed(call)
                alone = change(plain, alone, call)
            x, y = batch(call)
            mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
            step(model, optim, x[mine], y[mine])
            train(plain, alone, x, y)
        step.release()
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-12), (order, name)


class Shifted(nn.Sequential):
    """A model with a buffer that may be None: its result is shifted by it otherwise."""

    shift: torch.Tensor | None

    def __init__(self, shift: torch.Tensor | None) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("shift", shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out if self.shift is None else out + self.shift


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("style", STYLES)
def test_a_buffer_that_becomes_none_or_is_none_no_longer_is_taken_over(ranks: Ranks, style: Any, door: Any) -> None:
    """Buffers of two kinds are replaced before calls 2, 4 and 6; a new name that is None changes nothing."""
    warnings.simplefilter("ignore")
    values = [torch.arange(4).double(), None, torch.tensor([3.0, 0, 0, -3]).double(), None]
    for order in (values, values[1:]):
        pairs = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Shifted(order[0]).double()
            pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.05)))
        (model, optim), (plain, alone) = pairs
        step = door(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
        for call in range(2 * len(order)):
            for one in (model, plain):
                if call % 2 == 0 and call:
                    one.shift = order[call // 2]
                elif call == 1:
                    one.register_buffer("unused", None)
            x, y = batch(call)
            mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
            step(model, optim, x[mine], y[mine])
            train(plain, alone, x, y)
        step.release()
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-12), (len(order), name)
        assert dict(model.named_buffers()) == {} and model.shift is None


@pytest.mark.ranks(2)
def test_a_step_that_shares_refuses_a_buffer_that_becomes_none_or_a_tensor(ranks: Ranks) -> None:
    """It has no placement of its own to make anew: the step that it shares with takes the change over."""

    def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(model(x).sum(0))

    torch.manual_seed(0)
    model, (x, y) = Shifted(None).double(), batch(0)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = dp.compile(train, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    shared = dp.compile(evaluate, share=step)
    step(model, optim, x, y)
    shared(model, x)
    for shift, change in ((torch.ones(4).double(), "was not there"), (None, "is not there any more")):
        model.shift = shift
        with pytest.raises(dp.PlanError, match=rf"model-changed\] shift.*({change})"):
            shared(model, x)
        step(model, optim, x, y)
        value = shared(model, x)
        with step.unsharded():
            torch.testing.assert_close(value, evaluate(model, x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_release_and_unsharded_leave_the_callers_objects(ranks: Ranks, door: Any) -> None:
    model, optim = made()
    step = door(train, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    warnings.simplefilter("ignore")
    step(model, optim, *batch(0))
    new = head(5)
    weight = new.weight.detach().clone()
    model[2] = new
    step.release()
    assert model[2] is new and torch.equal(new.weight, weight)
    step(model, torch.optim.AdamW(model.parameters()), *batch(1))
    last: Any = model[2]
    with step.unsharded():
        last.bias = None
    assert last.bias is None
    bias: Any = model[0].bias
    bias.data = torch.zeros(16).double()  # a DTensor ignores it
    with pytest.raises(dp.PlanError, match=r"parameter-replaced.*0.bias.*\.data ="):
        step(model, torch.optim.AdamW(model.parameters()), *batch(2))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    rows: int


@dataclasses.dataclass(frozen=True)
class Nested:
    inner: Any
    parts: list[Any]


class Mapped(dict[str, Any]):
    pass


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


RESULTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (lambda loss: Output(loss, 4), lambda r: r.loss),
    "frozen, nested": (lambda loss: Nested(Output(loss, 1), [loss]), lambda r: r.inner.loss),
    "namespace": (lambda loss: types.SimpleNamespace(loss=loss, other=[loss]), lambda r: r.other[0]),
    "dict subclass": (lambda loss: Mapped(loss=loss), lambda r: r["loss"]),
    "user dict": (lambda loss: collections.UserDict(loss=loss), lambda r: r["loss"]),
    "slots": (Slotted, lambda r: r.loss),
    "distribution": (lambda loss: torch.distributions.Normal(loss, 1.0), lambda r: r.loc),
    "deque": (lambda loss: collections.deque([Output(loss, 2)]), lambda r: r[0].loss),
}


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("door", DOORS)
def test_results_are_real_tensors_in_the_steps_own_containers(ranks: Ranks, door: Any) -> None:
    for name, (pack, unpack) in RESULTS.items():
        losses = []
        for step_of in (None, door):
            model, optim = made()

            def step(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor, pack: Any = pack) -> Any:
                return pack(train(model, optim, x, y))

            called = step if step_of is None else door(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
            results = [called(model, optim, *batch(call)) for call in range(3)]  # all ranks have the same rows
            assert type(results[-1]) is type(pack(torch.zeros(()))), name
            tensors = [unpack(result) for result in results]
            assert all(type(one) is torch.Tensor for one in tensors), name
            losses.append([float(one) for one in tensors])
        assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[0][0] != losses[0][2], name
    model, optim = made()
    hidden = dp.compile(lambda *args: lambda: train(*args), mesh=ranks.mesh((2,), ("dp",)))
    with pytest.raises(dp.PlanError):
        hidden(model, optim, *batch(0))

    def in_a_closure(*args: Any) -> Any:
        loss = train(*args)
        return lambda: loss

    with pytest.raises(dp.PlanError, match=r"unsupported-argument.*function that holds tensors"):
        dp.compile(in_a_closure, mesh=ranks.mesh((2,), ("dp",)))(*made(), *batch(0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("style", STYLES)
def test_two_steps_over_one_model(ranks: Ranks, style: Any, door: Any) -> None:
    """A GAN's: each has its own optimizer, made before the first call, and reaches both networks."""

    def networks() -> Any:
        torch.manual_seed(0)
        g, d = nn.Linear(4, 8).double(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        return g, d, torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)

    def d_step(g: Any, d: Any, optim: Any, x: torch.Tensor, z: torch.Tensor) -> Any:
        with torch.no_grad():
            fake = g(z)
        loss = F.softplus(-d(x)).mean() + F.softplus(d(fake)).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    def g_step(g: Any, d: Any, optim: Any, z: torch.Tensor) -> Any:
        loss = F.softplus(-d(g(z))).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        g.zero_grad()
        d.zero_grad()
        return loss.detach()

    mesh = ranks.mesh((2,), ("dp",))
    if door is dp.compile:
        first = dp.compile(d_step, mesh=mesh, style=style)
        second: Any = dp.compile(g_step, share=first)
    else:
        first, second = dp.distribute([d_step, g_step], mesh=mesh, style=style)
    ours, alone = networks(), networks()
    mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    for call in range(6):
        generator = torch.Generator().manual_seed(call)
        x, z = (torch.randn(8, size, generator=generator).double() for size in (8, 4))
        for (g, d, og, od), rows, functions in ((ours, mine, (first, second)), (alone, slice(None), (d_step, g_step))):
            functions[0](g, d, od, x[rows], z[rows])
            functions[1](g, d, og, z[rows])
    checked = runner_of(second).schedule.num_checked
    assert checked >= 2
    first.release()
    trained, expected = ([*g.parameters(), *d.parameters()] for g, d, *_ in (ours, alone))
    for got, want in zip(trained, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    g, d, og, _ = ours
    g_step(g, d, og, z)  # the second step's optimizer has the plain parameters again


@pytest.mark.ranks(2)
def test_share_with_one_of_two_models(ranks: Ranks) -> None:
    (model, optim), x, y = made(), *batch(0)
    ema = copy.deepcopy(model).requires_grad_(False)

    def both(model: Any, ema: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = train(model, optim, x, y)
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(model(x).sum())

    step = dp.compile(both, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    step(model, ema, optim, x, y)
    values = [dp.compile(evaluate, share=step)(one, x) for one in (model, ema)]
    step.release()
    for value, one in zip(values, (model, ema), strict=True):
        torch.testing.assert_close(value, evaluate(one, x))
    assert values[0] != values[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_ranks_that_write_differently_are_found(ranks: Ranks, door: Any) -> None:
    """A layer that each rank initialises with its own seed between two calls: found at call 4, on all ranks."""
    model, optim = made()
    step = door(train, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    with pytest.raises(dp.PlanError, match=r"ranks-diverge\] 2.weight.*after call 4"):  # noqa: PT012
        for call in range(8):
            if call == 3:
                with torch.no_grad():
                    weight: Any = model[2].weight
                    getattr(weight, "_local_tensor", weight).add_(0.1 * ranks.rank)
            step(model, optim, *batch(call))
    assert call == 3


@pytest.mark.ranks(2)
def test_collectives_in_place(ranks: Ranks) -> None:
    def counted(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        number = torch.tensor([len(x)])
        dist.all_reduce(number)
        return train(model, optim, x, y), number

    def by_hand(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optim.step()
        optim.zero_grad()

    warnings.simplefilter("ignore")
    mesh, (x, y) = ranks.mesh((2,), ("dp",)), batch(0)
    for function in (counted, by_hand):
        with pytest.raises(dp.PlanError, match=r"not-traceable.*allreduce_.*dp_partition.distribute"):
            dp.compile(function, mesh=mesh)(*made(), x, y)
    step, parts = dp.distribute(counted, mesh=mesh), made()
    assert [step(*parts, x, y)[1].item() for _ in range(4)] == [16] * 4
    step, parts = dp.distribute(by_hand, mesh=mesh), made()
    step(*parts, x, y)
    with pytest.raises(dp.PlanError, match=r"unsupported-argument.*allreduce_.*all_reduce\(p.grad\).*leave it out"):
        step(*parts, x, y)
    (model, optim), (plain, alone) = made(), made()
    step = dp.distribute(by_hand, mesh=mesh, style="replicate")
    for _ in range(3):
        step(model, optim, x, y)
        train(plain, alone, x, y)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
def test_a_norm_of_the_mean_gradient_is_returned_under_accumulation(ranks: Ranks, style: Any) -> None:
    def step(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        return Output(loss.detach(), 1), norm

    x, y = batch(0)
    mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    expected = step(*made(), x, y)
    got = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style=style, accumulate=2)(*made(), x[mine], y[mine])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-9, atol=0)
    losses = ranks.gather(float(got[0].loss))
    assert sum(losses) / 2 == pytest.approx(float(expected[0].loss), rel=1e-9)


SCHEDULED: dict[str, Any] = {}
COUNTS = {"calls": 0}


def scheduled(x: torch.Tensor, y: torch.Tensor) -> Any:
    train(SCHEDULED["model"], SCHEDULED["optim"], x, y)
    SCHEDULED["schedule"].step()
    COUNTS["calls"] += 1
    return SCHEDULED["optim"].param_groups[0]["lr"]


def with_arguments(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    train(model, optim, x, y)
    SCHEDULED["schedule"].step()
    return optim.param_groups[0]["lr"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("function", [scheduled, with_arguments])
def test_a_scheduler_in_a_global_is_stepped_once_and_the_calls_are_checked(
    ranks: Ranks, style: Any, function: Any
) -> None:
    model, optim = made()
    COUNTS["calls"] = 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda count: 1 / (count + 1))
    SCHEDULED.update(model=model, optim=optim, schedule=schedule)
    step = dp.distribute(function, mesh=ranks.mesh((2,), ("dp",)), style=style)
    held = (model, optim) if function is with_arguments else ()
    rates = [step(*held, *batch(call)) for call in range(4)]
    assert rates == pytest.approx([0.05 / (call + 2) for call in range(4)])
    assert f"{3 if style == 'fully_shard' else 2} calls of {function.__name__} checked" in step.explain()
    assert COUNTS["calls"] == (4 if function is scheduled else 0)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randint(-8, 8, (6, 8), dtype=torch.int8), requires_grad=False)
        self.added = nn.Parameter(torch.randn(6, 8).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.frozen.double() + self.added).T


class Normed(nn.Module):
    """A batch norm of a transposed tensor: the kernel's strides are not those of its fake."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x.view(2, -1, 8)).transpose(1, 2)).transpose(1, 2)
        return torch.as_tensor(self.down(hidden).mean(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("make", [Quantised, Normed])
def test_models_that_ended_in_errors_of_torch(ranks: Ranks, style: Any, door: Any, make: Any) -> None:
    def step(model: Any, optim: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return torch.as_tensor(loss.detach())

    warnings.simplefilter("ignore")
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make().double() if make is Normed else make()
        pairs.append((model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)))
    called = door(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    for call in range(3):
        x, _ = batch(call)  # the same rows on both ranks
        assert float(called(*pairs[0], x)) == pytest.approx(float(step(*pairs[1], x)), rel=1e-9)
    called.release()
    for got, want in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_an_optimizer_that_rounds_otherwise_on_shards_keeps_its_parameters_full(ranks: Ranks) -> None:
    """Muon in bfloat16; AdamW's updates of shards are equal bit for bit."""
    moved: dict[Any, list[torch.Tensor]] = {}
    kinds = ((torch.optim.Muon, False), (torch.optim.AdamW, True))
    for kind, is_sharded in kinds:
        for style in STYLES:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 4, bias=False)).bfloat16()
            optim = kind(model.parameters(), lr=0.05)

            def step(model: Any, optim: Any, x: torch.Tensor) -> None:
                model(x).float().square().mean().backward()
                optim.step()
                optim.zero_grad()

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                called = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style=style)  # type: ignore[call-overload]
                for call in range(4):
                    generator = torch.Generator().manual_seed(2 * call + ranks.rank)
                    called(model, optim, torch.randn(8, 64, generator=generator).bfloat16())
            if style == "fully_shard":
                assert [isinstance(p, DTensor) for p in model.parameters()] == [is_sharded] * 2
            called.release()
            moved[kind, style] = [p.detach() for p in model.parameters()]
        assert all(map(torch.equal, moved[kind, "replicate"], moved[kind, "fully_shard"]))


class Mixture(nn.Module):
    """A forward that leaves its loss and its hidden state in attributes: the step reads one, the caller the other."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.balance: Any = None
        if hidden is None:
            self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.body(x))
        self.balance = self.hidden.square().mean()
        out: torch.Tensor = self.head(self.hidden)
        return out


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("door", DOORS)
def test_a_tensor_that_a_forward_leaves_in_an_attribute_is_there_between_calls(
    ranks: Ranks, style: Any, door: Any
) -> None:
    def step(model: Any, optim: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean() + 0.1 * model.balance
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    for hidden in (None, "absent"):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Mixture(hidden).double())
        optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        called = door(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
        for call, rows in enumerate((4, 4, 6, 4, 6, 4)):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(call)).double()  # the same on both
            called(models[0], optims[0], x)
            step(models[1], optims[1], x)
            for name in ("hidden", "balance"):
                got, want = (getattr(model, name).detach() for model in models)
                torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
            assert models[0].hidden.shape == (rows, 8)
        if door is dp.compile:
            assert called.num_traces == 2
        called.release()


@pytest.mark.ranks(2)
def test_a_forward_that_reads_what_its_last_call_left_is_a_mismatch(ranks: Ranks) -> None:
    class Recurrent(nn.Linear):
        before: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            out = out if self.before is None else out + self.before
            self.before = out.detach()
            return out

    def step(model: Any, optim: Any, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()

    model = Recurrent(8, 3).double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    called = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    x = torch.randn(4, 8, dtype=torch.float64)
    called(model, optim, x)
    with pytest.raises(dp.PlanError, match="check-mismatch"):
        called(model, optim, x)


@pytest.mark.ranks(2)
def test_a_copy_of_a_model_in_shards_is_refused_with_the_way_on_and_runs_within_unsharded(ranks: Ranks) -> None:
    def step(model: Any, optim: Any, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    called = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)))
    x = torch.randn(4, 8, dtype=torch.float64)
    for _ in range(3):
        called(model, optim, x)
    with pytest.raises(dp.PlanError, match=r"already-applied.*step.unsharded"):
        copy.deepcopy(model)
    with called.unsharded():
        copied = copy.deepcopy(model)
        want = model(x)
    assert torch.equal(copied(x), want) and type(copied) is nn.Sequential
    called(model, optim, x)
    called.release()
    assert torch.equal(copy.deepcopy(model)(x), model(x)) and not torch.equal(model(x), want)
