"""The user's own hooks on a parameter, which go on seeing DTensors.

The dict that ``register_hook`` filled stays the same object, so a handle that the user kept still removes its hook,
before the bridge, under it and after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tp_ddp_bridge._torch_compat import (
    post_accumulate_hooks,
    set_post_accumulate_hooks,
    set_tensor_hooks,
    tensor_hooks,
)
from tp_ddp_bridge.layout import Layout

Hooks: TypeAlias = "dict[int, Callable[..., Any]]"


class CarriedHooks:
    """Stands on a leaf for all ``register_hook`` hooks of the DTensor parameter it came from."""

    def __init__(self, hooks: Hooks, layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Hand the local gradient to each hook as a DTensor and take its answer back."""
        for hook in list(self.hooks.values()):
            answer = hook(self.layout.wrap(grad))
            if answer is None:
                continue
            if not isinstance(answer, DTensor):
                raise TypeError(
                    f"a gradient hook of a parameter laid out as {self.layout} returned a {type(answer).__name__}; "
                    "it gets a DTensor and has to return a DTensor or None"
                )
            grad = self.layout.localize(answer)
        return grad


class CarriedPostHooks:
    """Stands on a leaf for all ``register_post_accumulate_grad_hook`` hooks of the DTensor parameter it came from."""

    def __init__(self, hooks: Hooks, layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, leaf: torch.Tensor) -> None:
        """Show the leaf and its gradient as a DTensor parameter; a gradient that was replaced or dropped is so on the
        leaf.
        """
        for hook in list(self.hooks.values()):
            shown = torch.nn.Parameter(self.layout.wrap(leaf), requires_grad=leaf.requires_grad)
            before = None if leaf.grad is None else self.layout.wrap(leaf.grad)
            shown.grad = before
            hook(shown)
            if shown.grad is None:
                leaf.grad = None
            elif shown.grad is not before:
                assert isinstance(shown.grad, DTensor)
                leaf.grad = self.layout.localize(shown.grad)


def carry_hooks(parameter: torch.Tensor, leaf: torch.Tensor, layout: Layout) -> None:
    """Put stand-ins for the hooks of a DTensor ``parameter`` on its ``leaf``."""
    hooks = tensor_hooks(parameter)
    if hooks:
        leaf.register_hook(CarriedHooks(hooks, layout))
    later = post_accumulate_hooks(parameter)
    if later:
        stand_in = CarriedPostHooks(later, layout)
        leaf.register_post_accumulate_grad_hook(stand_in)


def register_carried(leaf: torch.Tensor, layout: Layout, hook: Callable[..., Any], after: bool) -> RemovableHandle:
    """Register a hook that sees DTensors on ``leaf``, beside those that it carries already.

    Args:
        leaf: A leaf.
        layout: Its layout.
        hook: What the user registered on the DTensor that the attribute gave.
        after: Whether it runs after the gradient has been accumulated.
    """
    kind: Any = CarriedPostHooks if after else CarriedHooks
    present = (post_accumulate_hooks(leaf) if after else tensor_hooks(leaf)) or {}
    carried: Any = next((one.hooks for one in present.values() if isinstance(one, kind)), None)
    if carried is None:
        carried = OrderedDict()
        register: Any = leaf.register_post_accumulate_grad_hook if after else leaf.register_hook
        register(kind(carried, layout))
    handle = RemovableHandle(carried)
    carried[handle.id] = hook
    return handle


def return_hooks(leaf: torch.Tensor, parameter: torch.Tensor) -> None:
    """Put the hooks that ``leaf`` was carrying back on a DTensor ``parameter``."""
    for carried in (tensor_hooks(leaf) or {}).values():
        if isinstance(carried, CarriedHooks):
            set_tensor_hooks(parameter, carried.hooks)
    for later in (post_accumulate_hooks(leaf) or {}).values():
        if isinstance(later, CarriedPostHooks):
            set_post_accumulate_hooks(parameter, later.hooks)


def foreign_hooks(leaf: torch.Tensor) -> int:
    """How many hooks were put on the leaf itself and see local gradients: they cannot be given back to a DTensor."""
    on_grad = [hook for hook in (tensor_hooks(leaf) or {}).values() if not isinstance(hook, CarriedHooks)]
    after = [hook for hook in (post_accumulate_hooks(leaf) or {}).values() if not isinstance(hook, CarriedPostHooks)]
    return len(on_grad) + len(after)
