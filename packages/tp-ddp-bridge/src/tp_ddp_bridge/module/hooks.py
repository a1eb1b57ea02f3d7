"""Hooks of a DTensor parameter, run for its leaf: they go on seeing DTensors.

They stay in the dict that torch made for them, so that a handle which the user kept removes its hook before the bridge,
under it and after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge._torch_compat import HOOK_TABLES
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


class PostAccumulateHooks(GradHooks):
    """Stands on a leaf for all ``register_post_accumulate_grad_hook`` hooks of its DTensor parameter."""

    def __call__(self, leaf: torch.Tensor) -> None:
        """Pass leaf and gradient to each hook as a DTensor parameter; a new ``grad`` goes back to the leaf."""
        for hook in list(self.hooks.values()):
            parameter = nn.Parameter(self.layout.wrap(leaf), requires_grad=leaf.requires_grad)
            before = parameter.grad = None if leaf.grad is None else self.layout.wrap(leaf.grad)
            hook(parameter)
            if parameter.grad is not before:
                leaf.grad = None if parameter.grad is None else self.layout.localize(parameter.grad)


KINDS = {"register_hook": GradHooks, "register_post_accumulate_grad_hook": PostAccumulateHooks}


def _hooks_of(tensor: torch.Tensor, method: str) -> dict[int, Callable[..., Any]]:
    return getattr(tensor, HOOK_TABLES[method]) or {}


def register_on_leaf(leaf: torch.Tensor, layout: Layout, method: str, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a ``hook`` that takes DTensors for ``leaf``, as ``method`` of a DTensor parameter does."""
    present = [each for each in _hooks_of(leaf, method).values() if isinstance(each, GradHooks)]
    hooks = present[0].hooks if present else OrderedDict()
    if not present:
        getattr(leaf, method)(KINDS[method](hooks, layout))
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def forward_hooks_to_leaf(parameter: torch.Tensor, leaf: torch.Tensor, layout: Layout) -> None:
    """Let the hooks of a DTensor ``parameter`` run for its ``leaf``."""
    for method, kind in KINDS.items():
        if hooks := _hooks_of(parameter, method):
            getattr(leaf, method)(kind(hooks, layout))


def return_hooks(leaf: torch.Tensor, parameter: torch.Tensor) -> None:
    """Give a DTensor ``parameter`` the hooks back that run for ``leaf``."""
    for method, kind in KINDS.items():
        for each in _hooks_of(leaf, method).values():
            if isinstance(each, kind):
                setattr(parameter, HOOK_TABLES[method], each.hooks)


def has_local_hooks(leaf: torch.Tensor) -> bool:
    """Return whether hooks sit on the leaf itself and see local gradients: no DTensor can take those over."""
    return any(not isinstance(hook, GradHooks) for method in KINDS for hook in _hooks_of(leaf, method).values())


def refuse_gradients(parameter: torch.Tensor, name: str) -> None:
    """Raise when a replaced ``parameter`` gets a gradient: a module computes with a reference that it kept."""
    reason = "a gradient arrived at the DTensor that a local leaf has replaced: the module kept a reference to it"
    problem = Problem("parameter-replaced", name, found=reason, hint="read the parameter as an attribute in forward")

    def refuse(_: torch.Tensor) -> None:
        raise PlanError(problem)

    setattr(parameter, HOOK_TABLES["register_post_accumulate_grad_hook"], None)  # users' hooks belong to the leaf now
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(refuse)
