"""Plain Python values as part of a key: numbers, names, and lists, dicts and settings objects made of them.

A trace burns in what a step reads beside tensors. Where it reads it from can be looked at before each call: attributes
of modules, and the closure, defaults and globals of the step's function and of the functions that those name. Tensors
and functions count by identity, other values by their type only: what they compute with is not known. Of an object's
attributes those count that the code names: a list of past losses beside them may grow.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection
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
    """Return whether `frozen` holds more of the value than its type."""
    return isinstance(value, (*PLAIN, *_CONTAINERS, *_FUNCTIONS, torch.Tensor)) or _is_settings(value)


def frozen(value: Any, names: Collection[str], depth: int = _DEPTH) -> Any:
    """A hashable copy of the part of a value that can be compared.

    Args:
        value: Any value.
        names: Which attributes of settings objects count.
        depth: How far to look into containers.
    """
    kind = type(value)
    if kind in PLAIN_TYPES or isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, (torch.Tensor, *_FUNCTIONS)):
        return Same(value)
    if isinstance(value, nn.Module):
        plain = tuple([(key, one) for key, one in vars(value).items() if type(one) in PLAIN_TYPES])
        return Same(value), plain, tuple(map(Same, value.buffers()))
    if depth == 0:
        return kind
    if isinstance(value, list | tuple):
        return kind, tuple([frozen(one, names, depth - 1) for one in value])
    if isinstance(value, dict):
        return kind, tuple([(_name(key), frozen(one, names, depth - 1)) for key, one in value.items()])
    if isinstance(value, set | frozenset):
        return kind, frozenset(frozen(one, names, depth - 1) for one in value)
    if _is_settings(value):
        return kind, frozen_attributes(value, names, depth)
    return kind


def frozen_attributes(value: Any, names: Collection[str], depth: int = _DEPTH) -> Any:
    """The attributes of an object that count."""
    return tuple([(key, frozen(one, names, depth - 1)) for key, one in vars(value).items() if key in names])


def _name(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else type(key)


def _is_settings(value: Any) -> bool:
    """An object such as a dataclass, a namespace, a model's config or a loss."""
    if isinstance(value, _NOT_SETTINGS) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, nn.Module):
        return True
    return not type(value).__module__.startswith(("torch", "dp_partition."))


class _Every:
    """All names."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def fingerprint(value: Any) -> Any:
    """A hashable copy of an object with all its attributes."""
    return frozen(value, _Every())


class FunctionConstants:
    """The plain values that a function and the functions it names read from outside.

    Args:
        function: A function, method, partial or callable object.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.places: list[tuple[Any, str | None]] = []
        self.objects: list[Any] = []  # whose method or call the function is
        self.names: set[str] = set()
        self._visit(function, set())

    def read(self) -> tuple[Any, ...]:
        """The values now, hashable."""
        values = [frozen(_at(owner, name), self.names) for owner, name in self.places]
        return tuple(values), tuple([frozen_attributes(one, self.names) for one in self.objects])

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
            if hasattr(function.__self__, "__dict__"):
                self.objects.append(function.__self__)
            function = function.__func__
        elif not isinstance(function, types.FunctionType):
            if callable(function) and not isinstance(function, _NOT_SETTINGS) and hasattr(function, "__dict__"):
                self.objects.append(function)
                self._visit(type(function).__call__, seen)
            return
        if (function.__module__ or "").split(".")[0] == "torch":
            return
        named = names_in(function.__code__)
        for cell in function.__closure__ or ():
            self._look_at((cell, "cell_contents"), seen)
            self._look_into_module(_at(cell, "cell_contents"), named)
        self._look_at((function, "__defaults__"), seen)
        self._look_at((function, "__kwdefaults__"), seen)
        self.names |= named
        for name in sorted(named):
            if name in function.__globals__:
                self._look_at((function.__globals__, name), seen)
                self._look_into_module(function.__globals__[name], named)

    def _look_into_module(self, value: Any, named: Collection[str]) -> None:
        """Settings in a module: the plain values that the code names."""
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] != "torch":
            table = vars(value)
            settings = (*PLAIN, *_CONTAINERS)
            self.places += [(table, key) for key in sorted(named) if isinstance(table.get(key), settings)]

    def _look_at(self, place: tuple[Any, str], seen: set[int]) -> None:
        value = _at(*place)
        if can_be_compared(value):
            self.places.append(place)
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._visit(value, seen)
        elif callable(value) and _is_settings(value) and not isinstance(value, nn.Module):
            self._visit(type(value).__call__, seen)


def _at(owner: Any, name: str | None) -> Any:
    if isinstance(owner, dict):
        return owner.get(name)
    try:
        return getattr(owner, str(name))
    except ValueError:  # a cell that is empty
        return None


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names in a function's code: globals, attributes, and strings, which may be names too."""
    found = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= names_in(one)
    return frozenset(found)


def names_of_forward(owner: type[nn.Module]) -> frozenset[str]:
    """Return the names in a module's `forward`, and in the methods and functions that it calls."""
    if owner not in _forward_names:
        _forward_names[owner] = _names_of_forward(owner)
    return _forward_names[owner]


_forward_names: weakref.WeakKeyDictionary[type[nn.Module], frozenset[str]] = weakref.WeakKeyDictionary()


def _names_of_forward(owner: type[nn.Module]) -> frozenset[str]:
    found: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [owner.forward]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "fget", function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        waiting.append(getattr(function, "__wrapped__", None))
        waiting += [_at(cell, "cell_contents") for cell in function.__closure__ or ()]
        if (function.__module__ or "").split(".")[0] == "torch" and function is not owner.forward:
            continue
        named = names_in(function.__code__)
        found |= named
        waiting += [inspect.getattr_static(owner, name, None) for name in named]
        waiting += [function.__globals__.get(name) for name in named]
    return frozenset(found)


__all__ = [
    "PLAIN_TYPES",
    "FunctionConstants",
    "Same",
    "can_be_compared",
    "fingerprint",
    "frozen",
    "frozen_attributes",
    "names_in",
    "names_of_forward",
]
