"""Steps: what is done to weights and state, and when."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dp_plain_step import WIDTH, finish, inner
from torch import nn


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
    fake = two[0](x)
    critic: Any = F.softplus(two[1](fake.detach())).mean() + F.softplus(-two[1](y)).mean()
    critic.backward()
    optims[1].step()
    optims[1].zero_grad()
    maker: Any = F.softplus(-two[1](fake)).mean()
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
    grad_sum = grad.sum()
    optim.zero_grad()
    return loss, grad_sum


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
