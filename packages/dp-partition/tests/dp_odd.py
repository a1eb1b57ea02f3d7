"""Train steps off the beaten track: each is right in every style, or refused with the code that stands beside it.

A step gets a list of models (one, or a generator and a critic), an optimizer for each, and a rank's rows. The reference
is DistributedDataParallel around each model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import torch
import torch.nn.functional as F
from ranktest import Ranks
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

STEPS = 5
WIDTH = 8


def mlp() -> nn.Module:
    return models.mlp(WIDTH, WIDTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def layer_twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer)


@dataclass(frozen=True)
class Odd:
    """One step.

    Attributes:
        function: The step.
        make: Makes its model.
        optim: Makes its optimizer.
        refused: The problem's code where it cannot be run.
        count: How many models it trains.
        unused: Whether some parameters get no gradient.
        reference: What DistributedDataParallel can run in its stead.
        close: How far it may be from its reference: sums in another order.
        every: Whether the tests run it in every style, because what it does depends on where parameters lie.
    """

    function: Callable[..., Any]
    make: Callable[[], nn.Module] = mlp
    optim: Callable[[Any], torch.optim.Optimizer] = adamw
    refused: str = ""
    count: int = 1
    unused: bool = False
    reference: Callable[..., Any] | None = None
    close: float = 1e-6
    every: bool = False


def inner(model: nn.Module) -> Any:
    """The model behind DistributedDataParallel."""
    return getattr(model, "module", model)


def finish(optim: torch.optim.Optimizer, loss: Any) -> Any:
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def plain(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    return finish(optim, F.mse_loss(model(x), y))


# ---- gradients ------------------------------------------------------------------------------------------------------


def clip(change: Callable[[Any], object], model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss: Any = F.mse_loss(model(x), y)
    loss.backward()
    change(model.parameters())
    optim.step()
    optim.zero_grad()
    return loss


def grads_sign(params: Any) -> None:
    for param in params:
        param.grad.sign_()


def grads_decayed(params: Any) -> None:
    for param in params:
        param.grad = param.grad + 0.1 * param.detach()


def grads_centred(params: Any) -> None:
    """Gradient centralisation: a mean over a dim that is sharded, and one over a dim that is not."""
    for param in params:
        if param.ndim > 1:
            param.grad.sub_(param.grad.mean(dim=0, keepdim=True)).sub_(param.grad.mean(dim=1, keepdim=True))


def grads_none(params: Any) -> None:
    """The first parameter is left out of the update."""
    next(iter(params)).grad = None


def two_losses(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = model(x)
    first, second = F.mse_loss(out, y), out.abs().mean()
    total: Any = first + 0.1 * second
    total.backward()
    optim.step()
    optim.zero_grad()
    return {"first": first, "second": second, "out": out}


def penalty_on_input(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return finish(optim, F.mse_loss(out, y) + grad.square().mean())


def penalty_on_weights(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, list(inner(model).parameters()), create_graph=True)
    return finish(optim, loss + sum(g.square().sum() for g in grads))


def grads_by_hand(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.mse_loss(model(x), y)
    params = list(inner(model).parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    optim.step()
    optim.zero_grad()
    return loss


def with_closure(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = F.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        return loss

    loss: torch.Tensor = optim.step(closure)
    optim.zero_grad()
    return loss


def zeros_instead_of_none(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optim.zero_grad(set_to_none=False)
    loss: Any = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad(set_to_none=False)
    return loss


def hooked(method: str) -> nn.Module:
    model = models.mlp(WIDTH, WIDTH)
    if method == "register_hook":
        model[0].weight.register_hook(lambda grad: 2 * grad)  # type: ignore[operator]
    else:
        model[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))  # type: ignore[operator]
    return model


# ---- models ---------------------------------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.body = nn.Linear(WIDTH, WIDTH), models.mlp(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Buffers(nn.Module):
    """Buffers that are written in place, replaced, and used."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
            self.calls += 1
        return (out - self.mean) / self.calls


class Counts(nn.Module):
    """A Python number that forward changes: a graph would burn it in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.body(x) * self.calls
        return out


class SharedMemory(nn.Module):
    """A buffer that is a view of a parameter: wherever the parameter goes, the buffer does not follow."""

    view: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("view", self.body.weight.data[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.view.sum()
        return out


class Strided(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 6).t())
        self.conv = nn.Conv2d(2, WIDTH, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.turned)[:, :, None, None].expand(-1, -1, 2, 2)[:, :2]
        out: torch.Tensor = self.conv(y).flatten(1)
        return out


class Small(nn.Module):
    """Fewer rows than ranks, no rows, no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.row = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1, WIDTH))
        self.none, self.scale = nn.Parameter(torch.zeros(0, WIDTH)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.body(x) * self.row, F.linear(x, self.none)], 1) * self.scale


class Rounded(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x.to(torch.bfloat16)).double()).float()
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(WIDTH, WIDTH), models.mlp(WIDTH, WIDTH), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return out


def parametrized(kind: str) -> nn.Module:
    model = models.mlp(WIDTH, WIDTH)
    getattr(nn.utils.parametrizations, kind)(model[0])
    return model


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((x.abs() * 3).long() % WIDTH).sum(1)
        return out


# ---- updates --------------------------------------------------------------------------------------------------------


def autocast(dtype: torch.dtype, model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=dtype):
        loss = F.mse_loss(model(x).float(), y)
    return finish(optim, loss)


def scaled(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    scaler = torch.amp.GradScaler(x.device.type)
    loss = F.mse_loss(model(x * torch.where(x.sum() > 6, 1e38, 1.0)), y)
    grown: Any = scaler.scale(loss)
    grown.backward()
    scaler.step(optim)
    optim.zero_grad()
    return loss


def clamped(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = finish(optim, F.mse_loss(model(x), y))
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.2, 0.2)
    return loss


def normalised(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The update is followed by a reduction over a dim that is sharded."""
    loss = finish(optim, F.mse_loss(model(x), y))
    with torch.no_grad():
        for param in model.parameters():
            param.div_(param.norm(dim=0, keepdim=True) + 1)
    return loss


def averaged(two: list[nn.Module], optims: list[Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """The second model follows the first."""
    loss = finish(optims[0], F.mse_loss(two[0](x), y))
    with torch.no_grad():
        for slow, fast in zip(inner(two[1]).parameters(), inner(two[0]).parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return loss


def adversarial(two: list[nn.Module], optims: list[Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    made = two[0](x)
    critic: Any = F.softplus(two[1](made.detach())).mean() + F.softplus(-two[1](y)).mean()
    critic.backward()
    optims[1].step()
    optims[1].zero_grad()
    maker: Any = F.softplus(-two[1](made)).mean()
    maker.backward()
    optims[0].step()
    optims[0].zero_grad()
    optims[1].zero_grad()
    return critic, maker


def twice(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Two updates in one call."""
    finish(optim, F.mse_loss(model(x), y))
    return finish(optim, F.mse_loss(model(x), -y))


def noisy_input(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return finish(optim, F.mse_loss(F.dropout(model(x + torch.randn_like(x)), 0.3), y))


def writes_argument(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = finish(optim, F.mse_loss(model(x), y))
    x.add_(1)
    return loss, x.sum()


def data_dependent(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.mse_loss(model(x), y)
    return finish(optim, loss if loss.item() < 100 else loss * 0)


def rank_value_into_weight(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = finish(optim, F.mse_loss(model(x), y))
    with torch.no_grad():
        inner(model)[0].bias.add_(x.mean(0).repeat(2))
    return loss


@torch.no_grad()
def zero_a_row(model: Any) -> None:
    model[0].weight[0].zero_()


def parts_of_weights(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """In a sharded weight each of these is a write to a copy, unless the rank's part goes back."""
    plain_model = inner(model)
    zero_a_row(plain_model)  # before forward
    loss = finish(optim, F.mse_loss(model(x), y))
    with torch.no_grad():
        weight, bias = plain_model[0].weight, plain_model[2].bias
        rows, flat, column = weight[1:5], weight.view(-1)[10:30], weight[:, 1]
        rows.mul_(0.5)
        column.add_(1.0)
        flat.sub_(0.1)
        bias[1:3].zero_()
        plain_model[2].weight[:, 3:5] = 1.0
        weight.index_fill_(0, torch.tensor([6, 9], device=x.device), 0.25)
        weight[7] = weight[8] * 2
        return loss, rows.sum(), weight.norm(), column * 2


def views_from_before(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Views that were taken before the update see it, and what is written to them is written to the weight."""
    plain_model = inner(model)
    rows, halves = plain_model[0].weight.detach()[2:7], plain_model[2].weight.detach().split(4)
    loss = finish(optim, F.mse_loss(model(x), y))
    with torch.no_grad():
        rows.mul_(0.9)
        plain_model[0].weight.mul_(1.1)
        halves[1].neg_()
        return loss, rows.sum(), halves[0].sum(), halves[1].clone(), plain_model[2].weight.norm()


def parts_of_gradients(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Rows of an embedding that must not learn, and moments that are forgotten."""
    loss: Any = F.mse_loss(model(x), y)
    loss.backward()
    grad = inner(model)[0].weight.grad
    grad[0].zero_()
    grad[3:5].mul_(2.0)
    grad[:, 1].zero_()
    optim.step()
    for state in optim.state.values():
        state["exp_avg"][0].zero_()
    found = grad.sum()
    optim.zero_grad()
    return loss, found


def data_assigned(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = finish(optim, F.mse_loss(model(x), y))
    weight = inner(model)[0].weight
    weight.data = weight.data * 0.9
    return loss


def sharpness_aware(model: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Weights go up along the gradient, back again after a second backward, and are then updated."""
    params = list(inner(model).parameters())
    loss: Any = F.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        ups = [param.grad / (param.grad.norm() + 1e-3) * 0.05 for param in params]
        for param, up in zip(params, ups, strict=True):
            param.add_(up)
            param.grad = None
    second: Any = F.mse_loss(model(x), y)
    second.backward()
    with torch.no_grad():
        for param, up in zip(params, ups, strict=True):
            param.sub_(up)
    optim.step()
    optim.zero_grad()
    return loss, second


def some_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "maximize": True}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.5, dampening=0.1)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)


def no_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6, bias=False), nn.Tanh(), nn.Linear(6, WIDTH, bias=False))


clip_norm = nn.utils.clip_grad_norm_
ODD: dict[str, Odd] = {
    "norm clipped": Odd(partial(clip, partial(clip_norm, max_norm=0.1))),
    "norm clipped, p = 1": Odd(partial(clip, partial(clip_norm, max_norm=0.1, norm_type=1.0))),
    "norm clipped, p = inf": Odd(partial(clip, partial(clip_norm, max_norm=0.1, norm_type=float("inf")))),
    "norm clipped, foreach": Odd(partial(clip, partial(clip_norm, max_norm=0.1, foreach=True))),
    "value clipped": Odd(partial(clip, partial(nn.utils.clip_grad_value_, clip_value=0.01))),
    "signs of gradients": Odd(partial(clip, grads_sign)),
    "gradients replaced": Odd(partial(clip, grads_decayed)),
    "gradients centred": Odd(partial(clip, grads_centred)),
    "a gradient left out": Odd(partial(clip, grads_none)),
    "two losses, a dict": Odd(two_losses),
    "penalty on the input's gradient": Odd(penalty_on_input),
    "penalty on the weights' gradient": Odd(penalty_on_weights, refused="second-derivative"),
    "gradients by hand": Odd(grads_by_hand, reference=plain),
    "closure": Odd(with_closure),
    "zeros instead of None": Odd(zeros_instead_of_none),
    "hook on a parameter": Odd(plain, partial(hooked, "register_hook"), refused="parameter-hooks"),
    "hook after accumulation": Odd(plain, partial(hooked, "post"), refused="parameter-hooks"),
    "unused parameters": Odd(plain, Unused, unused=True),
    "buffers": Odd(plain, Buffers, partial(torch.optim.SGD, lr=0.1)),
    "a Python counter": Odd(plain, Counts, refused="python-state"),
    "a buffer in a parameter's memory": Odd(plain, SharedMemory, refused="shared-memory"),
    "strided parameters": Odd(plain, Strided),
    "few rows, none, no dims": Odd(plain, Small, partial(torch.optim.SGD, lr=0.1)),
    "several dtypes": Odd(plain, Rounded, partial(torch.optim.SGD, lr=0.1)),
    "complex": Odd(plain, Complex, partial(torch.optim.SGD, lr=0.1)),
    "checkpointed": Odd(plain, partial(Recomputed, False)),
    "checkpointed, reentrant": Odd(plain, partial(Recomputed, True)),
    "weight norm": Odd(plain, partial(parametrized, "weight_norm")),
    "spectral norm": Odd(plain, partial(parametrized, "spectral_norm")),
    "orthogonal": Odd(plain, partial(parametrized, "orthogonal")),
    "sparse gradients": Odd(plain, Sparse, partial(torch.optim.SGD, lr=0.1), refused="sparse-gradient"),
    "autocast bfloat16": Odd(partial(autocast, torch.bfloat16)),
    "autocast float16": Odd(partial(autocast, torch.float16)),
    # Without a cache of casts the two gradients of the weight are added in float32, with one in bfloat16.
    "autocast, a layer twice": Odd(partial(autocast, torch.bfloat16), layer_twice, close=2e-2),
    "gradient scaler, overflow": Odd(scaled),
    "gradient scaler of values": Odd(scaled, optim=partial(torch.optim.SGD, lr=0.1), refused="not-traceable"),
    "weights clamped": Odd(clamped),
    "weights normalised": Odd(normalised),
    "a second model follows": Odd(averaged, count=2),
    "adversarial": Odd(adversarial, count=2),
    "two updates": Odd(twice),
    "noise": Odd(noisy_input),
    "an argument is written": Odd(writes_argument),
    "a branch on the loss": Odd(data_dependent, refused="not-traceable"),
    "a rank's value in a weight": Odd(rank_value_into_weight, refused="ranks-diverge", every=True),
    "parts of weights written": Odd(parts_of_weights, every=True),
    "parts of gradients and moments written": Odd(parts_of_gradients, close=1e-5, every=True),
    "`weight.data =`": Odd(data_assigned, refused="parameter-replaced"),
    "sharpness-aware minimisation": Odd(sharpness_aware, close=1e-5),
    "views from before the update": Odd(views_from_before, every=True),
    "RAdam": Odd(plain, optim=torch.optim.RAdam, refused="optimizer-not-traceable"),
    "ASGD": Odd(plain, optim=torch.optim.ASGD, refused="optimizer-not-traceable"),
    "Adafactor": Odd(plain, optim=torch.optim.Adafactor, refused="optimizer-not-traceable"),
    "Rprop": Odd(plain, optim=torch.optim.Rprop),
    "Adamax": Odd(plain, optim=torch.optim.Adamax),
    "SparseAdam": Odd(plain, Sparse, torch.optim.SparseAdam, refused="python-state"),
    "LBFGS": Odd(with_closure, optim=torch.optim.LBFGS, refused="optimizer-not-traceable"),
    "groups, maximize": Odd(plain, optim=some_groups),
    "Muon": Odd(plain, no_bias, muon, close=1e-2),  # bfloat16 inside,
}


def run_odd(ranks: Ranks, odd: Odd, style: str, **settings: Any) -> str:
    """``bitwise``, ``close: ...`` or ``refused: code``; anything else raises."""
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    ours, theirs = ([model.to(ranks.device) for model in _made(odd)] for _ in range(2))
    step = dp.compile(odd.function, mesh=mesh, style=style, **settings)
    try:
        found = _train(ranks, odd, ours, ours, step)
    except dp.PlanError as error:
        codes = sorted({problem.code for problem in error.problems})
        assert len(set(map(tuple, ranks.gather(codes)))) == 1, "all ranks refuse alike"
        return f"refused: {', '.join(codes)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        parallel = partial(
            nn.parallel.DistributedDataParallel, broadcast_buffers=False, find_unused_parameters=odd.unused
        )
        wrapped: list[nn.Module] = [parallel(model) for model in theirs]
    expected = _train(ranks, odd, theirs, wrapped, odd.reference or odd.function)
    worst = max(ranks.gather(_difference(found, expected)))
    assert worst <= odd.close, f"differs from DistributedDataParallel by {worst:.0e}"
    return "bitwise" if worst == 0 else f"close: {worst:.0e}"


def _made(odd: Odd) -> list[nn.Module]:
    """The models; a copy of them would lose hooks and shared memory."""
    torch.manual_seed(0)
    return [odd.make() for _ in range(odd.count)]


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The greatest one, relative to the greatest value of its tensor."""
    assert len(found) == len(expected) > STEPS
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if not torch.equal(one, other):
            wide = torch.complex128 if one.is_complex() else torch.float64
            scale = other.to(wide).abs().max().item() or 1.0
            off = (one.to(wide) - other.to(wide)).abs().max().item() / scale
            assert off == off, "not a number, where the reference has one"
            worst = max(worst, off)
    return worst


def _train(ranks: Ranks, odd: Odd, bare: list[nn.Module], used: list[nn.Module], function: Any) -> list[torch.Tensor]:
    """All results and arguments, then all parameters and buffers."""
    optims = [odd.optim(model.parameters()) for model in bare]
    found: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(3 + ranks.rank)
    for number in range(STEPS):
        torch.manual_seed(10 * number + ranks.rank)
        x, y = (torch.randn(4, WIDTH, generator=generator).to(ranks.device) for _ in range(2))
        args = (used[0], optims[0]) if odd.count == 1 else (used, optims)
        out = function(*args, x, y)
        found += [leaf.detach().clone() for leaf in pytree.tree_leaves(out)] + [x]
    if isinstance(function, dp.Step):
        function.release()
    return found + [t.detach() for model in bare for t in (*model.parameters(), *model.buffers())]


# Two markers cannot stand for parameters that one call updates twice; the error says which style can.
ALSO_REFUSED = {("two updates", style): "no-way" for style in ("zero1", "zero2")}
