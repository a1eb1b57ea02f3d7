"""Steps: what is done to gradients, and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dp_models as models
import torch
import torch.nn.functional as F
from dp_plain_step import WIDTH, finish, inner
from torch import nn


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
