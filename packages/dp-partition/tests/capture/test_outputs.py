"""State that a call leaves for the next one: modes, frozen parameters, gradients, hooks, generators."""

from __future__ import annotations

import copy
import functools
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.plan.plan import Style
from ranktest import Ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

CALLS = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return out


def update(optim: Any, loss: Any) -> Any:
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss


def leaves_eval(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    loss = update(o1, (one(x) - x).square().mean())
    one.eval()
    return loss


def sets_modes(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    one.train()
    one.norm.eval()
    return update(o1, (one(x) - x).square().mean())


def freezes(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    loss = update(o1, (one(x) - x).square().mean())
    one.body.requires_grad_(not one.body.weight.requires_grad)
    return loss


def critic_left_frozen(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    fake = one(x)
    other.requires_grad_(True)
    first = update(o2, F.softplus(-other(x)).mean() + F.softplus(other(fake.detach())).mean())
    other.requires_grad_(False)
    return first, update(o1, F.softplus(-other(fake)).mean())


def generator_first(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    """The first pass adds to gradients of the other model that are cleared before anything reads them."""
    first = update(o1, F.softplus(-other(one(x))).mean())
    return first, update(o2, F.softplus(-other(x)).mean() + F.softplus(other(one(x).detach())).mean())


def weighted_losses(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    """Parts of a parameter meet the batch, all of it the loss: under shards a sum that is not yet reduced."""
    error = (one(x) - x).square().mean()
    return update(o1, error * torch.exp(-one.scale[0]) + one.scale.sum() + 0.01 * one.head.weight.abs().sum())


def rows_of_experts(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    """Rows are chosen by values: sizes that no trace holds."""
    out = torch.zeros_like(x)
    chosen = one(x).argmax(-1) % 2
    for index, expert in enumerate((one, other)):
        rows = torch.where(chosen == index)[0]
        out = out.index_add(0, rows, expert.head(expert.body(x[rows])))
    o2.zero_grad()
    loss = update(o1, (out - x).square().mean())
    o2.step()
    return loss


RIGHT = (leaves_eval, sets_modes, freezes, critic_left_frozen, generator_first, weighted_losses, rows_of_experts)


def trained(ranks: Ranks, function: Any, style: Style | None) -> list[torch.Tensor]:
    """Results, values and modes after some calls; with no style in plain PyTorch that averages gradients by hooks."""
    one, other = models.seeded(Net).double().to(ranks.device), models.seeded(Net).double().to(ranks.device)
    other.body.requires_grad_(False)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (one, other)]
    if style is None:
        for param in (*one.parameters(), *other.parameters()):
            was = param.requires_grad
            param.requires_grad_(True).register_hook(averaged)
            param.requires_grad_(was)
        step: Any = function
    else:
        step = dp.compile(function, mesh=ranks.mesh((ranks.world_size,), ("dp",)), style=style)
    results: list[torch.Tensor] = []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(10 * call + ranks.rank)
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(ranks.device)
        result = step(one, other, *optims, x)
        results += [r.detach() for r in (result if isinstance(result, tuple) else (result,))]
        modes = [m.training for m in one.modules()], [p.requires_grad for p in one.parameters()]
        results += map(torch.tensor, modes)
    if style is not None:
        step.release()
    return results + [t.detach() for model in (one, other) for t in model.state_dict().values()]


def averaged(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("style", "functions"), [("zero2", RIGHT[::2]), ("fully_shard", RIGHT[1::2])], ids=("zero2", "fully_shard")
)
def test_the_next_call_begins_with_it(ranks: Ranks, style: Style, functions: tuple[Any, ...]) -> None:
    for function in functions:
        with models.case(function.__name__):
            expected, results = trained(ranks, function, None), trained(ranks, function, style)
            assert len(results) == len(expected) > 3 * CALLS
            for one, another in zip(results, expected, strict=True):
                torch.testing.assert_close(one, another, rtol=1e-9, atol=1e-11)


def steps_first(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    o1.step()
    o1.zero_grad()
    loss = (one(x) - x).square().mean()
    loss.backward()
    return loss


def clears_one_of_two(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    loss = update(o1, other(one(x)).square().mean())
    o2.step()
    return loss


def clips_what_it_never_clears(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    o1.zero_grad()
    loss = other(one(x)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_([*one.parameters(), *other.parameters()], 0.1)
    o1.step()
    return loss


def forks(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        noise = torch.randn_like(x)
    return update(o1, (one(x + noise) - x).square().mean())


def recomputes_dropout(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    hidden = checkpoint(lambda rows: torch.dropout(one(rows), 0.5, True), x, use_reentrant=False)
    return update(o1, (hidden - x).square().mean())


def leaves_a_mode(one: Net, other: Net, o1: Any, o2: Any, x: torch.Tensor) -> Any:
    loss = update(o1, (one(x) - x).square().mean())
    torch.set_grad_enabled(False)
    return loss


@pytest.mark.ranks(2)
def test_what_a_graph_cannot_leave_is_refused(ranks: Ranks) -> None:
    refused = {
        steps_first: "check-mismatch",
        clears_one_of_two: "check-mismatch",
        clips_what_it_never_clears: "check-mismatch",
        forks: "random-replay",
        recomputes_dropout: "random-replay",
        leaves_a_mode: "check-error",
    }
    for function, code in refused.items():
        with models.case(function.__name__), pytest.raises(dp.PlanError, match=code):
            trained(ranks, function, "fully_shard")
        assert torch.is_grad_enabled()


@pytest.mark.ranks(2)
def test_hooks_that_come_after_the_first_call(ranks: Ranks) -> None:
    """A hook on a parameter is refused; a `step` put over the optimizer's, which no hook list shows, is traced."""

    def doubled(closure: Any = None) -> Any:
        for group in optim.param_groups:
            for param in group["params"]:
                param.grad.mul_(2)
        torch.optim.SGD.step(optim)

    x = torch.ones(4, 8, device=ranks.device)
    model = models.seeded(models.mlp).to(ranks.device)
    plain = copy.deepcopy(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard", check="never")
    step(model, optim, x)
    optim.step = doubled  # type: ignore[method-assign]
    step(model, optim, x)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rate in (0.1, 0.2):
        other.param_groups[0]["lr"] = rate
        models.mean_step(plain, other, x)
    with step.unsharded():
        for one, another in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, another)
    next(model.parameters()).register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(dp.PlanError, match="parameter-hooks"):
        step(model, optim, x)


class Tripled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def halved(module: nn.Module, grad_output: Any) -> Any:
    return tuple(gradient / 2 for gradient in grad_output)


@pytest.mark.ranks(2)
def test_a_module_that_changes_between_calls(ranks: Ranks) -> None:
    """Its class, and a hook before its backward, count at the next call, which no check looks at."""
    changes: list[Any] = [
        lambda layer: setattr(layer, "__class__", Tripled),
        lambda layer: layer.register_full_backward_pre_hook(halved),
    ]
    x = torch.ones(4, 8, device=ranks.device)
    for change in changes:
        model = models.seeded(models.mlp).to(ranks.device)
        plain = copy.deepcopy(model)
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
        step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard", check="never")
        losses = []
        for call in range(5):
            if call == 2:
                for each in (model, plain):
                    change([layer for layer in each.modules() if isinstance(layer, nn.Linear)][-1])
            losses.append((step(model, first, x), models.mean_step(plain, second, x)))
        for one, another in losses:
            torch.testing.assert_close(one, another)
        with step.unsharded():
            for one, another in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, another)


def draws_from(one: Net, optim: Any, x: torch.Tensor, generator: torch.Generator) -> Any:
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) + torch.rand_like(x)
    return update(optim, (one(x + noise) - x).square().mean())


@pytest.mark.ranks(2)
def test_generators_that_are_passed_go_on(ranks: Ranks) -> None:
    """The check compares generators after graph and step; a copy of the step draws from copies."""
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    generators = [torch.Generator(ranks.device)]
    if ranks.device.type == "cpu":
        generators.append(torch.default_generator)
    for generator in generators:
        losses = []
        for compiled in (True, False):
            model = models.seeded(Net).double().to(ranks.device)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step: Any = draws_from
            if compiled:
                step = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
            torch.manual_seed(1)
            generator.manual_seed(2)
            x = torch.ones(4, 8, dtype=torch.float64, device=ranks.device)
            if compiled and is_old:  # its traces hold no generators
                with pytest.raises(dp.PlanError, match="not-traceable"):
                    step(model, optim, x, generator)
                return
            losses.append([step(model, optim, x, generator).detach() for _ in range(5)])
        torch.testing.assert_close(losses[0], losses[1])


class Twice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Listed(torch.optim.SGD):
    """An optimizer with a list among its attributes, and settings in a class of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.factors = [1.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.factors[0])


def scale() -> None:
    """Holds a number in an attribute."""


def weighted(model: Net, optim: Any, x: torch.Tensor, loss: Any) -> Any:
    return update(optim, loss(model(x), x) * scale.by)  # type: ignore[attr-defined]


def backward_pre_hook(model: Net, optim: Any, loss: Any) -> Any:
    def double(module: nn.Module, gradients: Any) -> Any:
        return tuple(2 * one for one in gradients)

    model.head.register_full_backward_pre_hook(double)


def another_class(model: Net, optim: Any, loss: Any) -> Any:
    model.__class__ = Twice


def another_forward(model: Net, optim: Any, loss: Any) -> Any:
    class Patched(Net):
        pass

    model.__class__ = Patched
    Patched.forward = lambda self, x: 3 * Net.forward(self, x)  # type: ignore[method-assign]


def attribute_of_a_function(model: Net, optim: Any, loss: Any) -> Any:
    scale.by = 3.0  # type: ignore[attr-defined]


def list_in_an_optimizer(model: Net, optim: Any, loss: Any) -> Any:
    optim.factors[0] = 3.0


def keyword_of_a_partial(model: Net, optim: Any, loss: Any) -> Any:
    loss.keywords["beta"] = 0.1


def hook_of_all_modules(model: Net, optim: Any, loss: Any) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda module, args, out: 2 * out)


def hook_of_all_optimizers(model: Net, optim: Any, loss: Any) -> Any:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.mul_(0.5)

    return register_optimizer_step_post_hook(shrink)


BETWEEN = (
    backward_pre_hook, another_class, another_forward, attribute_of_a_function, list_in_an_optimizer,
    keyword_of_a_partial, hook_of_all_modules, hook_of_all_optimizers,
)  # fmt: skip


@pytest.mark.ranks(2)
def test_what_changes_between_calls_holds_at_once(ranks: Ranks) -> None:
    """No call is checked after the second: the key of a trace has to see the change."""
    for number, change in enumerate(BETWEEN):
        with models.case(change.__name__):
            results = []
            for compiled in (False, True):
                scale.by = 1.0  # type: ignore[attr-defined]
                model: Any = models.seeded(Net).double().to(ranks.device)
                optim, loss = Listed(model.parameters()), functools.partial(F.smooth_l1_loss, beta=1.0)
                step: Any = weighted
                if compiled:
                    style: Style = ("zero2", "replicate", "fully_shard")[number % 3]
                    step = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style=style, check="first")
                losses, handle = [], None
                for call in range(CALLS):
                    if call == 3:
                        handle = change(model, optim, loss)
                    generator = torch.Generator().manual_seed(call)  # equal on all ranks: one device's training
                    x = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(ranks.device)
                    losses.append(step(model, optim, x, loss).detach())
                if handle is not None:
                    handle.remove()
                if compiled:
                    assert step.num_traces == 2
                    step.release()
                results.append(losses)
            torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_what_another_module_made_is_refused(ranks: Ranks) -> None:
    """Backward would go on into it, outside the step."""
    model: Any = models.seeded(Net).to(ranks.device)
    other = nn.Linear(8, 8).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="zero2")
    x = torch.ones(4, 8, device=ranks.device)
    step(model, optim, other(x).detach().requires_grad_())
    with pytest.raises(dp.PlanError, match="unsupported-argument"):
        step(model, optim, other(x))


@pytest.mark.ranks(2)
def test_state_of_a_group_that_is_gone(ranks: Ranks) -> None:
    """Its entries stay in the optimizer, where the check does not miss them."""
    model: Any = models.seeded(Net).to(ranks.device)
    optim = torch.optim.AdamW([{"params": list(one.parameters())} for one in (model.body, model.norm, model.head)])
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x = torch.randn(6, 8, device=ranks.device)
    for call in range(CALLS):
        if call == 2:
            optim.param_groups.pop()
            weight = model.head.weight.full_tensor().clone()
        step(model, optim, x)
    assert torch.equal(model.head.weight.full_tensor(), weight)


def with_penalty(model: Net, optim: Any, x: torch.Tensor) -> Any:
    """The gradient of the batch is part of the loss, and backward leaves one on the batch."""
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return update(optim, model(x).square().mean() + gradient.square().sum())


def from_inside(model: Net, optim: Any, x: torch.Tensor) -> Any:
    return update(optim, model(x.requires_grad_()).square().mean())


def in_place(model: Net, optim: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        x.mul_(0.5)
    return update(optim, model(x).square().mean())


@pytest.mark.ranks(2)
def test_what_a_step_leaves_on_its_arguments(ranks: Ranks) -> None:
    """Gradients are added up as without `compile`; under micro-batches nothing is left."""
    styles: tuple[Style, ...] = ("zero2", "replicate", "fully_shard")
    for number, function in enumerate((with_penalty, from_inside, in_place)):
        for semantics in ("local", "global"):
            with models.case(f"{function.__name__} {semantics}"):
                results = []
                for compiled in (False, True):
                    model: Any = models.seeded(Net).double().to(ranks.device)
                    optim = torch.optim.SGD(model.parameters(), lr=0.05)
                    step: Any = function
                    if compiled:
                        mesh = ranks.mesh((2,), ("dp",))
                        step = dp.compile(step, mesh=mesh, style=styles[number], semantics=semantics)
                    generator = torch.Generator().manual_seed(number)
                    x = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(ranks.device)
                    mine = x.clone() if not compiled or semantics == "local" else x[3 * ranks.rank : 3 * ranks.rank + 3]
                    mine = mine.clone().requires_grad_(function is with_penalty)
                    for _ in range(CALLS):
                        step(model, optim, mine)
                    if compiled:
                        step.release()
                    results.append([mine.detach(), *([] if mine.grad is None else [mine.grad])])
                rows = slice(None) if semantics == "local" else slice(3 * ranks.rank, 3 * ranks.rank + 3)
                assert len(results[0]) == len(results[1]) == 1 + (function is not in_place)
                for plain, compiled_one in zip(*results, strict=True):
                    torch.testing.assert_close(compiled_one, plain[rows], rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_micro_batches_leave_nothing_on_the_batch(ranks: Ranks) -> None:
    model: Any = models.seeded(Net).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    step = dp.compile(from_inside, mesh=ranks.mesh((2,), ("dp",)), style="zero2", accumulate=2)
    x = torch.ones(4, 8, device=ranks.device)
    for _ in range(5):
        step(model, optim, x)
    assert x.grad is None and not x.requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_momentum_buffer_that_is_none(ranks: Ranks, dampening: float) -> None:
    """SGD takes it for state that is not there yet, before the first call and later."""
    for first in (0, 4):
        results = []
        for compiled in (False, True):
            model: Any = models.seeded(Net).double().to(ranks.device)
            optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
            step: Any = models.mean_step
            if compiled:
                step = dp.compile(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
            losses = []
            for call in range(CALLS):
                if call == first:
                    for param in model.parameters():
                        optim.state[param]["momentum_buffer"] = None
                generator = torch.Generator().manual_seed(call)  # equal on all ranks: one device's training
                x = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(ranks.device)
                losses.append(step(model, optim, x).detach())
            if compiled:
                step.release()
            results.append(losses)
        torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def adds_a_group(model: Net, optim: Any, x: torch.Tensor) -> Any:
    loss = update(optim, model(x).square().mean())
    optim.add_param_group({"params": list(model.head.parameters())})
    return loss


@pytest.mark.ranks(2)
def test_a_group_that_the_step_adds_is_refused(ranks: Ranks) -> None:
    model: Any = models.seeded(Net).to(ranks.device)
    optim = torch.optim.SGD(model.body.parameters(), lr=0.1)
    step = dp.compile(adds_a_group, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    with pytest.raises(dp.PlanError, match="hyperparameter-changed"):
        step(model, optim, torch.ones(4, 8, device=ranks.device))
    assert len(optim.param_groups) == 1


def from_sparse(model: Net, optim: Any, x: torch.Tensor) -> Any:
    x = x.to_dense()
    return update(optim, (model(x) - x).square().mean())


@pytest.mark.ranks(2)
def test_a_sparse_batch(ranks: Ranks) -> None:
    """It is no tensor that can be compared before and after the call."""
    model: Any = models.seeded(Net).double().to(ranks.device)
    plain: Any = models.seeded(Net).double().to(ranks.device)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    step = dp.compile(from_sparse, mesh=ranks.mesh((2,), ("dp",)), style="zero2")
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)  # equal on all ranks: one device's training
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64).relu().to_sparse().to(ranks.device)
        torch.testing.assert_close(step(model, optims[0], x), from_sparse(plain, optims[1], x), rtol=1e-9, atol=1e-11)
