"""Steps that the tests of the command line name as MODULE:TRAIN_STEP."""

from __future__ import annotations

from typing import Any

import torch
from dp_models import mean_step, mlp

train_step = mean_step


def step_arguments() -> tuple[Any, ...]:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters()), torch.zeros(4, 8)


def no_tuple() -> Any:
    return mlp()


def diverging_step(model: Any, optim: Any, x: Any) -> Any:
    loss = model(x).square().mean()
    if loss > 1:
        loss.backward()
    return loss
