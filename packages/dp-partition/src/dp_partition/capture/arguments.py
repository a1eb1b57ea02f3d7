"""Objects as arguments: tensors in dataclasses and mappings become inputs of the graph.

Pytree opens registered types only (lists, dicts, named tuples, Hugging Face's outputs). A dataclass, a
``UserDict`` or a ``BatchEncoding`` is a leaf to it, and would be a constant of the trace. Such a leaf is replaced by an
`Opened` one, and restored for the step's Python.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.fingerprint import ById, fingerprint, is_array

_PLAIN_TYPES = (
    torch.Tensor, nn.Module, Optimizer, torch.Generator, type, bool, int, float, complex, str, bytes, type(None)
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Shell:
    """Type of an `Opened` argument, names of its values, other facts, and the empty object."""

    kind: type
    keys: tuple[Any, ...]
    rest: tuple[Any, ...]
    empty: Any = dataclasses.field(compare=False)


class Opened:
    """A dataclass or mapping among the arguments, with its values open to pytree."""

    def __init__(self, shell: _Shell, values: list[Any]) -> None:
        self.shell, self.values = shell, values


pytree.register_pytree_node(
    Opened, lambda one: (one.values, one.shell), lambda values, shell: Opened(shell, list(values))
)


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, Mapping):
        owner[key] = value  # type: ignore[index]  # mappings without this cannot be opened
    else:
        object.__setattr__(owner, key, value)  # frozen dataclasses too


@dataclasses.dataclass(slots=True)
class CallArguments:
    """The arguments of one call, read once.

    Attributes:
        args: Positional arguments, dataclasses and mappings opened.
        kwargs: Keyword arguments, likewise.
        leaves: Both, flattened.
        spec: Their structure.
        live: Positions of numbers that are inputs of the graph.
        marked: Dims of tensors whose sizes are symbols of a trace.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Any
    live: frozenset[int] = frozenset()
    marked: tuple[int, ...] = ()


def read_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Flatten the arguments of a call, and open dataclasses and mappings among them.

    Raises:
        PlanError: ``unsupported-argument`` for iterators, ``unsupported-argument`` for other objects with tensors.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN_TYPES):
            args, kwargs = _open_leaves(name, leaves, spec)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            break  # all leaves are opened at once
    return CallArguments(args, kwargs, leaves, spec)


def _open_leaves(name: str, leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten([_open(name, leaf) for leaf in leaves], spec)


def _open(name: str, leaf: Any) -> Any:
    if isinstance(leaf, _PLAIN_TYPES):
        return leaf
    if is_array(leaf):
        raise _refused(name, f"a {type(leaf).__name__}", "pass torch.as_tensor(array)")
    if isinstance(leaf, Iterator):
        reason = f"{type(leaf).__name__}: tracing would take one value from it, and every call would reuse that value"
        raise _refused(name, reason, "call next() outside, and pass what it gives")
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        keys = tuple(field.name for field in dataclasses.fields(leaf))
        values = [getattr(leaf, key) for key in keys]
    elif isinstance(leaf, Mapping) and hasattr(type(leaf), "__setitem__"):
        keys, values = tuple(leaf), list(leaf.values())
    else:
        slots = [getattr(leaf, name, None) for kind in type(leaf).__mro__ for name in vars(kind).get("__slots__", ())]
        tokens = () if callable(leaf) else fingerprint([leaf, *slots])
        if any(isinstance(one, ById) and isinstance(one.held, torch.Tensor) for one in tokens):
            hint = "make it a dataclass or a dict, or register it with torch.utils._pytree.register_pytree_node"
            reason = f"a {type(leaf).__name__} that holds tensors, which would be constants of the trace"
            raise _refused(name, reason, hint)
        return leaf
    empty = copy.copy(leaf)
    for key in keys:
        _put(empty, key, None)
    shell = _Shell(type(leaf), keys, fingerprint([empty]), empty)
    return Opened(shell, [_open_leaves(name, *pytree.tree_flatten(value)) for value in values])


def _refused(name: str, found: str, hint: str) -> PlanError:
    return PlanError(Problem("unsupported-argument", name, found=found, hint=hint))


def close_arguments(arguments: Any) -> Any:
    """Return the arguments in the step's own form."""

    def is_opened(value: Any) -> bool:
        return isinstance(value, Opened)

    def close(value: Any) -> Any:
        if not is_opened(value):
            return value
        closed = copy.copy(value.shell.empty)
        for key, one in zip(value.shell.keys, value.values, strict=True):
            _put(closed, key, close_arguments(one))
        return closed

    return pytree.tree_map(close, arguments, is_leaf=is_opened)


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for calls with opened arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = close_arguments((args, kwargs))
        return function(*args, **kwargs)

    try:
        return functools.wraps(function)(call)
    except (AttributeError, TypeError):
        return call
