"""Gradient hooks of a DTensor parameter, run for its leaf, still on DTensors.

They stay in torch's own dict for them, so a user's handle removes its hook before the bridge,
under it and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge._torch_compat import GRAD_HOOKS, POST_ACCUMULATE_HOOKS
from tp_ddp_bridge.layout import Layout


class GradHooks:
    """Hook of a leaf that runs all ``register_hook`` hooks of its DTensor parameter."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Pass the local gradient to each hook as a DTensor and take its result back."""
        for hook in list(self.hooks.values()):  # a hook may remove itself
            result = hook(self.layout.wrap(grad))
            grad = grad if result is None else self.layout.localize(result)
        return grad


def hook_problems(name: str, tensor: torch.Tensor) -> Iterator[Problem]:
    """Yield a problem for hooks that cannot move between a DTensor and its leaf."""
    on_grad = (getattr(tensor, GRAD_HOOKS) or {}).values()
    is_leaf = type(tensor) is torch.nn.Parameter
    if getattr(tensor, POST_ACCUMULATE_HOOKS) or (is_leaf and not all(isinstance(each, GradHooks) for each in on_grad)):
        reason = f"a hook registered on the {'local leaf' if is_leaf else 'DTensor'} cannot be carried over"
        hint = "remove it, and register it afterwards on the new parameter of named_parameters()"
        yield Problem("parameter-hooks", name, found=reason, hint=hint)


def refuse_gradients(parameter: torch.Tensor, name: str) -> None:
    """Raise on a gradient of a replaced ``parameter``: the module computes with an old reference."""
    reason = "a gradient arrived at the DTensor that a local leaf has replaced: the module kept a reference to it"
    problem = Problem("parameter-replaced", name, found=reason, hint="read the parameter as an attribute in forward")

    def refuse(_: torch.Tensor) -> None:
        raise PlanError(problem)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(refuse)
