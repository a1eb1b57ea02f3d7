"""Gradient hooks of a DTensor parameter, run for its leaf: they go on seeing DTensors.

They stay in the dict that torch made for them, so that a handle which the user kept removes its hook before the bridge,
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
    """Stands on a leaf for all ``register_hook`` hooks of its DTensor parameter."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Pass the local gradient to each hook as a DTensor and take its result back."""
        for hook in list(self.hooks.values()):
            result = hook(self.layout.wrap(grad))
            grad = grad if result is None else self.layout.localize(result)
        return grad


def hook_problems(name: str, tensor: torch.Tensor) -> Iterator[Problem]:
    """Yield a problem if hooks of a DTensor cannot run for a leaf, or those of a leaf not for a DTensor."""
    on_grad = (getattr(tensor, GRAD_HOOKS) or {}).values()
    is_leaf = type(tensor) is torch.nn.Parameter
    if getattr(tensor, POST_ACCUMULATE_HOOKS) or (is_leaf and not all(isinstance(each, GradHooks) for each in on_grad)):
        reason = f"a hook that was registered on the {'local leaf' if is_leaf else 'DTensor'} cannot go along"
        hint = "remove it, and register it again on what named_parameters() gives afterwards"
        yield Problem("parameter-hooks", name, found=reason, hint=hint)


def refuse_gradients(parameter: torch.Tensor, name: str) -> None:
    """Raise when a replaced ``parameter`` gets a gradient: a module computes with a reference that it kept."""
    reason = "a gradient arrived at the DTensor that a local leaf has replaced: the module kept a reference to it"
    problem = Problem("parameter-replaced", name, found=reason, hint="read the parameter as an attribute in forward")

    def refuse(_: torch.Tensor) -> None:
        raise PlanError(problem)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(refuse)
