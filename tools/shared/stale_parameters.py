"""Stale (replaced) parameters: an optimizer with one raises instead of training nothing.

An optimizer built before its model was sharded would never see a gradient again and leave the module's own parameters
unchanged. Every optimizer, ``zero_grad`` and ``clip_grad_norm_`` read ``.grad`` before anything else, so
a stale parameter raises there. Its values can still be read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .problems import PlanError, Problem

_GRAD: Any = torch.Tensor.grad
_KEY = "_stale_problem"


class StaleParameter:
    """Mixin of the class of a parameter that no module holds any more."""

    __slots__ = ()
    _is_stale_type = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A copy of a stale parameter has no problem of its own, and may have a gradient.
        if func == _GRAD.__get__ and _KEY in vars(args[0]):
            raise PlanError(vars(args[0])[_KEY])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]  # the tensor's own


@functools.cache
def _stale_type(kind: type) -> type:
    return type(f"Stale{kind.__name__}", (StaleParameter, kind), {"__slots__": (), "__module__": kind.__module__})


def mark_stale(parameter: torch.Tensor, problem: Problem, successor: torch.Tensor | None = None) -> None:
    """Raise ``problem`` from now on when the gradient of ``parameter`` is read.

    Args:
        parameter: The replaced object.
        problem: Usually ``parameter-replaced``, with the fully qualified name and the remedy.
        successor: The parameter in its place, for re-pointing optimizers later.
    """
    vars(parameter)[_KEY] = problem
    vars(parameter)["_stale_successor"] = successor
    if not hasattr(parameter, "_is_stale_type"):  # of any package: each has its own copy of the class below
        # The same object, so optimizers with it meet the error.
        parameter.__class__ = _stale_type(type(parameter))


def mark_current(parameter: torch.Tensor) -> None:
    """Undo `mark_stale`: the parameter has its place again."""
    if hasattr(parameter, "_is_stale_type"):
        parameter.__class__ = type(parameter).__bases__[1]  # the class before `mark_stale`
        vars(parameter).pop(_KEY, None)
        vars(parameter).pop("_stale_successor", None)


def is_stale(parameter: object) -> bool:
    """Return True if another parameter replaced this one."""
    return hasattr(parameter, "_is_stale_type") and _KEY in vars(parameter)


def current_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return the present parameter in the place of ``parameter``, through any number of replacements."""
    while is_stale(parameter) and vars(parameter)["_stale_successor"] is not None:
        parameter = vars(parameter)["_stale_successor"]
    return parameter
