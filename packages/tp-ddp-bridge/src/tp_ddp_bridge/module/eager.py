"""Views outside a forward, where users look at parameters, assign to them and hang hooks on them.

Reading ``module.weight.grad`` shows the gradient as a DTensor. Whatever is assigned to or registered on such a view
goes to the leaf: on the view itself it would vanish with it, silently.

Users' hooks go on seeing DTensors. The dict that ``register_hook`` filled stays the same object, so that a handle
which the user kept removes its hook before the bridge, under it and after it.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge._torch_compat import post_accumulate_hooks, set_post_accumulate_hooks, set_tensor_hooks, tensor_hooks
from tp_ddp_bridge.layout import Layout

Hooks: TypeAlias = "dict[int, Callable[..., Any]]"

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


class EagerView(DTensor):
    """A view outside a forward; ``data`` and ``grad`` that are assigned to it go to the leaf."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        """As of a DTensor: shares the leaf's memory."""
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        leaf, layout = self.__dict__["_of"]
        leaf.data = _checked_local(value, layout, "data")

    @property
    def grad(self) -> torch.Tensor | None:
        """The leaf's gradient in its layout, as it was when the view was read."""
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        leaf, layout = self.__dict__["_of"]
        leaf.grad = None if value is None else _checked_local(value, layout, "grad")
        _GRAD.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save and copy as a plain DTensor."""
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def _plain(self) -> DTensor:
        layout: Layout = self.__dict__["_of"][1]
        return layout.wrap(self._local_tensor)


def _checked_local(value: Any, layout: Layout, name: str) -> torch.Tensor:
    if not isinstance(value, DTensor) or value.shape != layout.shape:
        raise TypeError(
            f"{name} of a parameter that is laid out as {layout}: assign a DTensor of that global shape (found "
            f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))})"
        )
    return layout.localize(value)


def eager_view(view: Any, leaf: torch.Tensor, layout: Layout) -> Any:
    """Return ``view`` with the gradient of ``leaf``, passing on to ``leaf`` whatever is done to it."""
    if not isinstance(view, DTensor) or not isinstance(leaf, nn.Parameter) or isinstance(leaf, DTensor):
        return view
    grad = leaf.grad
    if grad is not None and grad.dtype == leaf.dtype and grad.layout == torch.strided:
        _GRAD.__set__(view, layout.wrap(grad))
    eager: Any = view
    eager.__class__ = EagerView
    eager.__dict__["_of"] = (leaf, layout)
    eager.register_hook = functools.partial(_register_on_leaf, leaf, layout, GradHooks)
    eager.register_post_accumulate_grad_hook = functools.partial(_register_on_leaf, leaf, layout, PostAccumulateHooks)
    return view


# ---- users' hooks ------------------------------------------------------------------------------------------------


class GradHooks:
    """Stands on a leaf for all ``register_hook`` hooks of its DTensor parameter."""

    def __init__(self, hooks: Hooks, layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Pass the local gradient to each hook as a DTensor and take its result back."""
        for hook in list(self.hooks.values()):
            result = hook(self.layout.wrap(grad))
            if result is None:
                continue
            if not isinstance(result, DTensor):
                raise TypeError(
                    f"a gradient hook of a parameter laid out as {self.layout} returned a {type(result).__name__}; "
                    "it gets a DTensor and has to return a DTensor or None"
                )
            grad = self.layout.localize(result)
        return grad


class PostAccumulateHooks:
    """Stands on a leaf for all ``register_post_accumulate_grad_hook`` hooks of its DTensor parameter."""

    def __init__(self, hooks: Hooks, layout: Layout) -> None:
        self.hooks = hooks
        self.layout = layout

    def __call__(self, leaf: torch.Tensor) -> None:
        """Pass leaf and gradient to each hook as a DTensor parameter; a changed ``grad`` goes back to the leaf."""
        for hook in list(self.hooks.values()):
            parameter = nn.Parameter(self.layout.wrap(leaf), requires_grad=leaf.requires_grad)
            before = None if leaf.grad is None else self.layout.wrap(leaf.grad)
            parameter.grad = before
            hook(parameter)
            if parameter.grad is None:
                leaf.grad = None
            elif parameter.grad is not before:
                assert isinstance(parameter.grad, DTensor)
                leaf.grad = self.layout.localize(parameter.grad)


def forward_hooks_to_leaf(parameter: torch.Tensor, leaf: torch.Tensor, layout: Layout) -> None:
    """Let the hooks of a DTensor ``parameter`` run for its ``leaf``."""
    hooks = tensor_hooks(parameter)
    if hooks:
        leaf.register_hook(GradHooks(hooks, layout))
    later = post_accumulate_hooks(parameter)
    if later:
        stand_in = PostAccumulateHooks(later, layout)
        leaf.register_post_accumulate_grad_hook(stand_in)


def refuse_gradients(parameter: torch.Tensor, name: str) -> None:
    """Raise when a replaced ``parameter`` gets a gradient: a module computes with a reference that it kept."""

    def refuse(_: torch.Tensor) -> None:
        problem = Problem(
            "parameter-replaced",
            name,
            found="a gradient arrived at the DTensor that a local leaf has replaced: the module kept a reference to it",
            hint="read the parameter as an attribute in forward",
        )
        raise PlanError(problem)

    set_post_accumulate_hooks(parameter, None)  # those of users belong to the leaf now
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(refuse)


def return_hooks(leaf: torch.Tensor, parameter: torch.Tensor) -> None:
    """Give a DTensor ``parameter`` the hooks back that run for ``leaf``."""
    for stand_in in (tensor_hooks(leaf) or {}).values():
        if isinstance(stand_in, GradHooks):
            set_tensor_hooks(parameter, stand_in.hooks)
    for later in (post_accumulate_hooks(leaf) or {}).values():
        if isinstance(later, PostAccumulateHooks):
            set_post_accumulate_hooks(parameter, later.hooks)


def has_local_hooks(leaf: torch.Tensor) -> bool:
    """Return whether hooks sit on the leaf itself and see local gradients: no DTensor can take those over."""
    on_grad = (tensor_hooks(leaf) or {}).values()
    after = (post_accumulate_hooks(leaf) or {}).values()
    return not all(isinstance(hook, GradHooks | PostAccumulateHooks) for hook in (*on_grad, *after))


def _register_on_leaf(leaf: torch.Tensor, layout: Layout, kind: Any, hook: Callable[..., Any]) -> RemovableHandle:
    after = kind is PostAccumulateHooks
    present = (post_accumulate_hooks(leaf) if after else tensor_hooks(leaf)) or {}
    hooks: Any = next((stand_in.hooks for stand_in in present.values() if isinstance(stand_in, kind)), None)
    if hooks is None:
        hooks = OrderedDict()
        register: Any = leaf.register_post_accumulate_grad_hook if after else leaf.register_hook
        register(kind(hooks, layout))
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
