"""Common parts of the steps of the table: a model, an optimizer, the end of a plain step."""

from __future__ import annotations

from typing import Any

import dp_models as models
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 5
WIDTH = 8


def mlp() -> nn.Module:
    return models.mlp(WIDTH, WIDTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def layer_twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer)


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
