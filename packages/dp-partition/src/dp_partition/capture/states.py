"""Optimizer state made up front, so that the graph of the first step is the graph of every step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer


def initial_state(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """The state that the optimizer's first step would begin with for one parameter.

    Args:
        optimizer: A ``torch.optim`` optimizer, or one written like it.
        group: The parameter group that ``param`` belongs to.
        param: A parameter or a shard of it; real or fake. Its ``grad`` is left as found.

    Returns:
        The state, or an empty dict when the optimizer makes it only from the first gradient; the first step then has a
        graph of its own.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return _momentum_buffer(group, param)
    init = getattr(optimizer, "_init_group", None)
    if init is None:
        return {}
    saved_state, saved_grad = optimizer.state, param.grad
    optimizer.state = defaultdict(dict)
    param.grad = torch.zeros_like(param)
    try:
        names = list(inspect.signature(init).parameters)[1:]
        init({**group, "params": [param]}, *([] for _ in names))
        return dict(optimizer.state[param])
    finally:
        optimizer.state, param.grad = saved_state, saved_grad


def _momentum_buffer(group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """SGD's first buffer is the gradient itself: with no dampening that is what a zero buffer gives."""
    if group["momentum"] != 0 and group["dampening"] == 0:
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
    return {}


def states_by_id(optimizer: Optimizer) -> dict[int, Any]:
    """The state of every parameter by its ``id``: hashing a tensor takes torch ten times as long."""
    return {id(param): state for param, state in optimizer.state.items()}
