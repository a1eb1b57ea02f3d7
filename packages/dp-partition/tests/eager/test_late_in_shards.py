"""A later call, or code between calls, meets shards as no earlier one did: it is right, or refused with the way on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

CALLS = 6


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(call: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(call), dtype=torch.float64)


def finish(optim: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def calls_a_function_of_the_model(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
    if call != 4:
        return finish(optim, model(x).square().mean())
    halved = {name: p * 0.5 for name, p in model.named_parameters()}
    return finish(optim, torch.func.functional_call(model, halved, (x,)).square().mean())


def penalizes_gradients(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    if call == 4:
        loss = loss + torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()  # a penalty
    return finish(optim, loss)


def penalizes(penalized: Callable[[torch.Tensor, list[Any]], Any]) -> Callable[..., Any]:
    def step(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
        loss = model(x).square().mean()
        return finish(optim, penalized(loss, list(model.parameters())) if call == 4 else loss)

    return step


def added(loss: torch.Tensor, parameters: list[Any]) -> Any:
    return loss + 0.1 * sum(p.square().sum() for p in parameters)  # a penalty


def weighed(loss: torch.Tensor, parameters: list[Any]) -> Any:
    return parameters[0].norm() * loss  # a weight: another one on each rank


def stacked(loss: torch.Tensor, parameters: list[Any]) -> Any:
    return torch.stack([loss, parameters[0][0].sum()]).sum()  # with a row


def alone(loss: torch.Tensor, parameters: list[Any]) -> Any:
    return loss.detach() * parameters[0].square().sum()


def assigned(loss: torch.Tensor, parameters: list[Any]) -> None:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # taken
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def by_keyword(loss: torch.Tensor, parameters: list[Any]) -> None:
    loss.backward(inputs=parameters[:2])  # one layer


def by_place(loss: torch.Tensor, parameters: list[Any]) -> None:
    torch.autograd.backward(loss, None, None, False, None, parameters)  # of all


def gradients_by_name(take: Callable[[torch.Tensor, list[Any]], None]) -> Callable[..., Any]:
    def step(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
        loss = model(x).square().mean()
        if call != 4:
            return finish(optim, loss)
        take(loss, list(model.parameters()))
        optim.step()
        return loss.detach()

    return step


@pytest.mark.ranks(2)
def test_what_a_later_call_needs_in_full_is_refused_by_all_ranks(ranks: Ranks) -> None:
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    refused = {
        calls_a_function_of_the_model: r"parameter-replaced.*weight: another tensor.*call it in call 1",
        penalizes_gradients: r"full-parameters.*test_late_in_shards.py:\d+.*# a penalty.*take them in call 1",
        # Without the refusal no gradient reached a shard, and these parameters trained no more.
        gradients_by_name(assigned): r"full-parameters.*test_late_in_shards.py:\d+.*# taken.*take them in call 1",
        gradients_by_name(by_keyword): r"full-parameters.*test_late_in_shards.py:\d+.*# one layer.*take them in call 1",
        gradients_by_name(by_place): r"full-parameters.*test_late_in_shards.py:\d+.*# of all.*take them in call 1",
    }
    # These are of each rank: `loss * penalty` has another gradient on each, which nobody averaged.
    refused |= {
        penalizes(penalized): rf"full-parameters.*a loss.*test_late_in_shards.py:\d+.*{line}.*take them in call 1"
        for penalized, line in ((added, "# a penalty"), (weighed, "# a weight"), (stacked, "# with a row"))
    }
    refused[penalizes(alone)] = r"full-parameters.*backward.*test_late_in_shards.py:\d+.*take them in call 1"
    backward = torch.autograd.backward
    for function, text in refused.items():
        model = made()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dp.distribute(function, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
        for call in range(CALLS):
            if call == 4:
                before = [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
                with pytest.raises(dp.PlanError, match=text):
                    step(model, optim, batch(call)[rows], call)
                optim.zero_grad()
                after = [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
                assert sum(map(torch.equal, before, after)) == 4
            else:
                step(model, optim, batch(call)[rows], call)  # call 6 works as ever
        step.release()
        assert torch.autograd.backward is backward  # also after the error


def weighs_by_a_norm(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
    loss = model(x).square().mean()
    return finish(optim, loss * model[0].weight.detach().norm() + loss if call >= 3 else loss)


@pytest.mark.ranks(2)
def test_a_number_of_shards_weighs_a_loss(ranks: Ranks) -> None:
    """The loss became a DTensor, whose gradient met the model's plain tensors."""
    model, alone = made(), made()
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    step = dp.distribute(weighs_by_a_norm, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    for call in range(CALLS):
        step(model, optims[0], batch(call)[4 * ranks.rank : 4 * ranks.rank + 4], call)
        weighs_by_a_norm(alone, optims[1], batch(call), call)
    step.release()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def logs_extremes(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
    loss = model(x).square().mean()
    loss.backward()
    optim.step()
    if call < 4:
        return 0.0
    extremes = [p.abs().max().item() + p.grad.min().item() + p.amax().item() for p in model.parameters()]
    extremes += [float(p.grad.norm(float("inf"))) for p in model.parameters()]
    extremes += [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")).item()]
    optim.zero_grad()
    return sum(extremes)


@pytest.mark.ranks(2)
def test_extremes_of_parameters_with_fewer_rows_than_ranks(ranks: Ranks) -> None:
    """A later call logs them: the rank without a row of the last bias raised alone, and the other one waited."""
    alone, model = made(), made()
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    step = dp.distribute(logs_extremes, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    for call in range(CALLS):
        wanted = logs_extremes(alone, optims[0], batch(call), call)
        number = step(model, optims[1], batch(call)[rows], call)
        assert number == pytest.approx(wanted, abs=1e-12), call
    step.release()


def on_shards(act: Callable[[Any], object]) -> Callable[..., Any]:
    def step(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
        if call == 4:
            with torch.no_grad():
                act(model[0].weight)  # of shards
        return finish(optim, model(x).square().mean())

    return step


ACTS: tuple[Callable[[Any], object], ...] = (
    lambda w: w.add_(torch.ones(5, 6).double()),
    lambda w: w.nonzero(),
    lambda w: w.renorm(2, 0, 0.5),
    lambda w: w.fill_diagonal_(0.0),
    lambda w: torch.nn.utils.parameters_to_vector([w]),
)


@pytest.mark.ranks(2)
def test_torchs_own_errors_on_shards_have_the_line_and_a_way_on(ranks: Ranks) -> None:
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    for act in ACTS:
        model = made()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dp.distribute(on_shards(act), mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
        for call in range(4):
            step(model, optim, batch(call)[rows], call)
        with pytest.raises(Exception) as error:  # of several types
            step(model, optim, batch(4)[rows], 4)
        notes = " ".join(error.value.__notes__)
        assert "on which torch cannot do this" in notes and "test_late_in_shards.py" in notes, notes
        assert 'use style="replicate"' in notes
        step(model, optim, batch(5)[rows], 5)
        step.release()


def averaging() -> Callable[..., Any]:
    """Gradients are smoothed by those of earlier calls: a dict has them from the first call on."""
    smooth: dict[str, torch.Tensor] = {}
    first: list[torch.Tensor] = []

    def step(model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
        if not first:
            first.extend(p.detach().clone() for p in model.parameters())
        pairs = zip(model.parameters(), first, strict=True)
        drift = torch.stack([(p.detach() - start).square().sum() for p, start in pairs]).sum()
        (model(x).square().mean()).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                smooth[name] = smooth.get(name, torch.zeros_like(p.grad)) * 0.9 + p.grad * 0.1
                p.grad.add_(smooth[name])
        optim.step()
        optim.zero_grad()
        return drift

    return step


class WithEmpty(nn.Module):
    """A table without rows, as a tokenizer without extra tokens has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = made(), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.extra.sum()
        return out


def plain() -> Callable[..., Any]:
    return lambda model, optim, x, call: finish(optim, model(x).square().mean())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("make", "function", "sharded"), [(made, averaging, 4), (WithEmpty, plain, 4)])
def test_values_equal_one_process(ranks: Ranks, make: Any, function: Any, sharded: int) -> None:
    warnings.simplefilter("ignore")
    model, alone = make(), make()
    optim, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    step, reference = dp.distribute(function(), mesh=ranks.mesh((2,), ("dp",)), style="fully_shard"), function()
    results = []
    for call in range(CALLS):
        x = batch(call)
        results.append((reference(alone, other, x, call), step(model, optim, x[4 * ranks.rank :][:4], call)))
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == sharded, step.explain()
    assert "3 calls of" in step.explain() and "unchecked" not in step.explain()
    step.release()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    if function is averaging:
        torch.testing.assert_close(*map(torch.tensor, zip(*((float(a), float(b)) for a, b in results), strict=True)))


@pytest.mark.ranks(2)
def test_averages_and_copies_between_calls_are_refused_and_right_within_unsharded(ranks: Ranks) -> None:
    model: Any = made()
    optim, average = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    step = dp.distribute(plain(), mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    for call in range(3):
        step(model, optim, batch(call)[4 * ranks.rank :][:4], call)
    full = torch.ones(5, 6, dtype=torch.float64)
    between: list[Callable[[], Any]] = [
        lambda: average.update_parameters(model),
        lambda: model[0].weight.data.copy_(full),
        lambda: full.copy_(model[0].weight.detach()),
    ]
    for use in between:
        with pytest.raises(dp.PlanError, match=r"local-shard-as-full.*test_late_in_shards.py:\d+.*with step.unsharded"):
            use()
    with step.unsharded():
        before = [p.detach().clone() for p in average.module.parameters()]
        average.update_parameters(model)
        for old, mean, own in zip(before, average.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mean, (old + own) / 2, rtol=1e-12, atol=0)
        model[0].weight.data.copy_(full)
    for call in range(3, 5):
        step(model, optim, batch(call)[4 * ranks.rank :][:4], call)
    step.release()
    assert float((model[0].weight.detach() - full).abs().max()) < 0.2, "training went on from what was written"


@pytest.mark.ranks(2)
def test_an_optimizer_that_no_call_had_before_the_shards(ranks: Ranks) -> None:
    """A generator's first call comes after two of the critic; a loop steps the optimizer itself."""

    def critic(g: Any, d: Any, optim: Any, x: torch.Tensor) -> Any:
        return finish(optim, d(g(x).detach()).mean() - d(x).square().mean())

    def generator(g: Any, d: Any, optim: Any, x: torch.Tensor) -> Any:
        loss = finish(optim, -d(g(x)).mean())
        d.zero_grad()
        return loss

    parts: list[list[Any]] = []
    for steps in ([critic, generator], dp.distribute([critic, generator], mesh=ranks.mesh((2,), ("dp",)))):
        torch.manual_seed(0)
        g, d = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
        optims = [torch.optim.RMSprop(m.parameters(), lr=1e-2) for m in (d, g)]
        for call in range(CALLS):
            x = batch(call) if steps[0] is critic else batch(call)[4 * ranks.rank :][:4]
            steps[0](g, d, optims[0], x)
            if call >= 2:
                steps[1](g, d, optims[1], x)
        parts.append([g, d, steps])
    parts[1][2][0].release()
    for want, got in zip(parts[0][:2], parts[1][:2], strict=True):
        for a, b in zip(want.parameters(), got.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)

    def gradients(model: Any, x: torch.Tensor, *others: Any) -> None:
        model(x).square().mean().backward()

    model, alone = made(), made()
    optim, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    step = dp.distribute(gradients, mesh=ranks.mesh((2,), ("dp",)))
    mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    for call in range(CALLS):
        step(model, batch(call)[mine], *([optim] if call else []))
        if not call:  # it has placed the model
            with pytest.raises(dp.PlanError, match=r"parameter-replaced.*pass that object, such as an optimizer that"):
                optim.step()
            model.zero_grad()
            step(model, batch(call)[mine], optim)  # it is among the arguments from now on
        optim.step()
        optim.zero_grad()
        gradients(alone, batch(call))
        other.step()
        other.zero_grad()
    step.release()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
