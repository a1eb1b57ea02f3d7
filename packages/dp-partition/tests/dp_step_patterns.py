"""Train steps as people write them, which no graph holds. Each builds a step and its objects; gradients are means.

A pattern returns `(step, values)`: ``step(x, y)`` trains on rows of a batch, ``values()`` gives the tensors that it
trains; one process on all rows is the reference for ranks on a part of them each.
"""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[torch.Tensor, torch.Tensor], Any]
Values = Callable[[], list[torch.Tensor]]
Pattern = Callable[[], tuple[Step, Values]]
PATTERNS: dict[str, Pattern] = {}
WIDTH = 6


def pattern(build: Pattern) -> Pattern:
    PATTERNS[build.__name__.strip("_")] = build
    return build


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def mse_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step that returns its loss as a number, so that no graph can hold it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@pattern
def _item_kept_in_a_meter() -> tuple[Step, Values]:
    model, losses = mlp(), []
    train = mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        losses.append(train(x, y))
        return sum(losses) / len(losses)

    return step, lambda: list(model.parameters())


@pattern
def _skips_not_a_number() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if not math.isfinite(loss.item()):
            return
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if norm.item() > 1e-6:
            optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _evaluates_before_the_update() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():  # a forward without backward, between backward and update
            loss = F.mse_loss(model(x), y).item()
        optimizer.step()
        return loss

    return step, lambda: list(model.parameters())


@pattern
def _average_made_by_the_first_call() -> tuple[Step, Values]:
    model, average = mlp(), dict[str, nn.Module]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = mse_step(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        if not average:
            average["model"] = copy.deepcopy(model)
        loss = train(x, y)
        with torch.no_grad():
            for mean, value in zip(average["model"].parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        return loss  # type: ignore[no-any-return]

    return step, lambda: list(model.parameters())


@pattern
def _torchscript_inside() -> tuple[Step, Values]:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, under another class in each torch
        model[2] = torch.jit.script(model[2])
    return mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), lambda: list(model.parameters())


class Bag(nn.Module):
    """Rows of a table, by the numbers of a batch; gradients of the table are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 8, sparse=True).double(), nn.Linear(8, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.table((x.abs() * 7).long() % 20)
        return torch.as_tensor(self.last(hidden.relu().mean(1)))


@pattern
def _sparse_embedding() -> tuple[Step, Values]:
    model = Bag()
    rows, rest = torch.optim.SparseAdam(model.table.parameters(), lr=0.1), torch.optim.Adam(model.last.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        rows.zero_grad()
        rest.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        rows.step()
        rest.step()
        return loss.item()

    return step, lambda: list(model.parameters())


@pattern
def _grad_scaler() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return step, lambda: list(model.parameters())


@pattern
def _lbfgs() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=4)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step, lambda: list(model.parameters())


@pattern
def _radam_and_plateau() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step(1.0)

    return step, lambda: list(model.parameters())


@pattern
def _backward_of_inputs() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(inputs=list(model.parameters()))
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _adafactor() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


class Lamb(torch.optim.Optimizer):
    """LAMB as papers print it: a norm of each parameter and of its update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
                state.setdefault("v", torch.zeros_like(p)).mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                weight, size = p.norm().item(), update.norm().item()
                p.add_(update, alpha=-group["lr"] * (weight / size if weight and size else 1.0))


@pattern
def _lamb() -> tuple[Step, Values]:
    model = mlp()
    optimizer = Lamb(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as published: an optimizer around another, two backward passes a step."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


@pattern
def _sam() -> tuple[Step, Values]:
    model = mlp()
    optimizer = Sam(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.first_step()
        F.mse_loss(model(x), y).backward()
        optimizer.second_step()

    return step, lambda: list(model.parameters())


@pattern
def _accumulates_over_calls() -> tuple[Step, Values]:
    model, count = mlp(), [0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        (F.mse_loss(model(x), y) / 3).backward()
        count[0] += 1
        if count[0] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step, lambda: list(model.parameters())


@pattern
def _adversarial_pair() -> tuple[Step, Values]:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    first = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        second.zero_grad()
        loss = F.softplus(-critic(y)).mean() + F.softplus(critic(generator(x).detach())).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        fooled = F.softplus(-critic(generator(x))).mean()
        fooled.backward()
        first.step()
        return loss.item(), fooled.item()

    return step, lambda: [*generator.parameters(), *critic.parameters()]


@pattern
def _gradient_penalty() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (F.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _average_of_weights() -> tuple[Step, Values]:
    model = mlp()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = {"steps": 0}

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        counts["steps"] += 1
        decay = min(0.99, (1 + counts["steps"]) / (10 + counts["steps"]))
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].mul_(decay).add_(p, alpha=1 - decay)

    return step, lambda: [*model.parameters(), *shadow.values()]


@pattern
def _target_network() -> tuple[Step, Values]:
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = iter(range(1000))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), 0.5 * target(x) + 0.5 * y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if next(calls) % 2:
            target.load_state_dict(model.state_dict())

    return step, lambda: [*model.parameters(), *target.parameters()]


class Trainer:
    """A trainer whose step is a method; model and optimizer are attributes."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.history: dict[str, list[float]] = {"loss": []}
        self.global_step = 0

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**self.global_step
        self.optimizer.zero_grad()
        loss = F.l1_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(float(loss))
        self.global_step += 1


@pattern
def _trainer_object() -> tuple[Step, Values]:
    trainer = Trainer()
    return trainer.training_step, lambda: list(trainer.model.parameters())


@pattern
def _unfreezes_by_and_by() -> tuple[Step, Values]:
    model, count = mlp(), [0]
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if count[0] == 3:
            model[0].requires_grad_(True)
        count[0] += 1
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _drops_layers() -> tuple[Step, Values]:
    model, draw = mlp(), random.Random(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        if draw.random() < 0.5:
            hidden = hidden + model[3](model[2](hidden))
        F.mse_loss(model[4](hidden), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _replaces_data() -> tuple[Step, Values]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            p.data = p.data.clamp(-0.4, 0.4)

    return step, lambda: list(model.parameters())


@pattern
def _gradient_hook_and_saving() -> tuple[Step, Values]:
    model, saved = mlp(), io.BytesIO()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> int:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        saved.seek(0)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        return saved.tell()

    return step, lambda: list(model.parameters())


@pattern
def _tied_and_complex() -> tuple[Step, Values]:
    first, last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    last.weight = first.weight
    phase = nn.Parameter(torch.full((WIDTH,), 0.3 + 0.4j, dtype=torch.complex128))
    head = nn.Linear(WIDTH, 3).double()
    model = nn.ModuleList([first, last, head])
    model.register_parameter("phase", phase)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        turned = torch.fft.ifft(torch.fft.fft(last(torch.tanh(first(x)))) * phase).real
        F.mse_loss(head(turned), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _optimizer_in_backward() -> tuple[Step, Values]:
    model = mlp()
    optimizers = {name: torch.optim.SGD([p], lr=0.05) for name, p in model.named_parameters()}

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    return step, lambda: list(model.parameters())


@pattern
def _checkpoints_activations() -> tuple[Step, Values]:
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        hidden = checkpoint(model[:2], x, use_reentrant=True)
        hidden = checkpoint(model[2:4], hidden, use_reentrant=False)
        F.mse_loss(model[4](hidden), y).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


class Momentum(nn.Module):
    """A forward writes its second encoder, which no unit around it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = mlp(), mlp()
        self.slow.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            for own, other in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        return self.online(x), self.slow(x)


@pattern
def _average_written_in_a_forward() -> tuple[Step, Values]:
    model = Momentum()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        got, target = model(x)
        (F.mse_loss(got, y) + F.mse_loss(got, target)).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


@pattern
def _gradients_of_samples() -> tuple[Step, Values]:
    """`vmap` puts tensors without memory into a module; the average is taken by hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, parameters, x)
        return F.mse_loss(out, y)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        own = {name: p.detach() for name, p in model.named_parameters()}
        norms = torch.vmap(torch.func.grad(one), (None, 0, 0))(own, x.detach(), y)
        weight = 1 / (1 + 0 * norms["0.weight"].square().sum())
        (F.mse_loss(model(x), y) * weight).backward()
        optimizer.step()

    return step, lambda: list(model.parameters())


class Nested(nn.Module):
    """A forward that runs inside itself: FSDP2 would free its parameters after the inner run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        x = x + self(x, depth - 1) if depth else x
        out: torch.Tensor = (self.last if depth else torch.tanh)(self.first(x))
        return out


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x.to(torch.complex128)).abs())
        return out


@pattern
def _two_dtypes() -> tuple[Step, Values]:
    model = TwoDtypes()
    return mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), lambda: list(model.parameters())


@pattern
def _module_inside_itself() -> tuple[Step, Values]:
    model = Nested().double()
    return mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), lambda: list(model.parameters())
