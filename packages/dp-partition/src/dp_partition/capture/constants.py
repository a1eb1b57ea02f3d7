"""Plain Python values as part of a key: numbers, names, and lists, dicts and settings objects made of them.

A trace burns in what a step reads beside tensors. Where it reads it from can be looked at before each call: attributes
of modules, and the closure, defaults and globals of the step's function and of the functions that those name. Tensors
and functions count by identity, other values by their type only: what they compute with is not known.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
PLAIN_TYPES = frozenset(PLAIN)  # without subclasses, which are looked at one by one
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEPTH = 4
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_NOT_SETTINGS = (torch.Tensor, torch.optim.Optimizer, types.ModuleType, type, *_FUNCTIONS)


class Same:
    """An object by identity; held, so that no other one gets its place in memory."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held


def can_be_compared(value: Any) -> bool:
    """Whether `frozen` says more of the value than its type."""
    return isinstance(value, (*PLAIN, *_CONTAINERS, *_FUNCTIONS, torch.Tensor)) or _is_settings(value)


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """A hashable copy of the plain part of a value."""
    kind = type(value)
    if kind in PLAIN_TYPES or isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, (torch.Tensor, *_FUNCTIONS)):
        return Same(value)
    if depth == 0:
        return kind
    if isinstance(value, list | tuple):
        return type(value), tuple([frozen(one, depth - 1) for one in value])
    if isinstance(value, dict):
        return type(value), tuple([(_name(key), frozen(one, depth - 1)) for key, one in value.items()])
    if isinstance(value, set | frozenset):
        return type(value), frozenset(frozen(one, depth - 1) for one in value)
    if _is_settings(value):
        return type(value), tuple([(key, frozen(one, depth - 1)) for key, one in vars(value).items()])
    return type(value)


def _name(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else type(key)


def _is_settings(value: Any) -> bool:
    """An object such as a dataclass, a namespace, a model's config or a loss."""
    if isinstance(value, _NOT_SETTINGS) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, nn.Module):
        return True
    return not type(value).__module__.startswith("torch") and not callable(value)


class FunctionConstants:
    """The plain values that a function and the functions it names read from outside.

    Args:
        function: A function, method, partial or callable object.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.places: list[tuple[Any, str | None]] = []
        self._visit(function, set())

    def read(self) -> tuple[Any, ...]:
        """The values now, hashable."""
        return tuple([frozen(_at(owner, name)) for owner, name in self.places])

    def _visit(self, function: Any, seen: set[int]) -> None:
        if id(function) in seen:
            return
        seen.add(id(function))
        if isinstance(function, functools.partial):
            self._look_at((function, "args"), seen)
            self._look_at((function, "keywords"), seen)
            self._visit(function.func, seen)
            return
        if isinstance(function, types.MethodType):
            self._look_at((function, "__self__"), seen)
            function = function.__func__
        elif not isinstance(function, types.FunctionType):
            if callable(function) and not isinstance(function, _NOT_SETTINGS) and hasattr(function, "__dict__"):
                self.places.append((function, "__dict__"))
                self._visit(type(function).__call__, seen)
            return
        if (function.__module__ or "").split(".")[0] == "torch":
            return
        for cell in function.__closure__ or ():
            self._look_at((cell, "cell_contents"), seen)
        self._look_at((function, "__defaults__"), seen)
        self._look_at((function, "__kwdefaults__"), seen)
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                self._look_at((function.__globals__, name), seen)

    def _look_at(self, place: tuple[Any, str], seen: set[int]) -> None:
        value = _at(*place)
        if can_be_compared(value):
            self.places.append(place)
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._visit(value, seen)


def _at(owner: Any, name: str | None) -> Any:
    if isinstance(owner, dict):
        return owner.get(name)
    try:
        return getattr(owner, str(name))
    except ValueError:  # a cell that is empty
        return None


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


__all__ = ["PLAIN_TYPES", "FunctionConstants", "Same", "can_be_compared", "frozen"]
