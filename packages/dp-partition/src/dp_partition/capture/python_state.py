"""Python values changed by a step while it is traced, restored afterwards.

A failed trace has run the step once more than requested. Its changes of lists, dicts and counters
would be changes without a call, and a fake tensor in one of them would fail in the next eager use.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition.capture.fingerprint import PLAIN, names_used

_DEPTH = 7
_MOST_MEMBERS = 10_000  # of one container: a data set in a list changes in no step
_OPAQUE = (
    *(*PLAIN, torch.Tensor, torch.Generator, type, types.ModuleType, io.IOBase, logging.Logger),
    *(DeviceMesh, dist.ProcessGroup),
)
_CONTAINERS = (list, dict, set, deque)
_EMPTY = object()


class PythonState:
    """Contents of all containers, objects, cells and globals within a step's reach.

    Args:
        roots: The step's function and its arguments.
    """

    def __init__(self, *roots: Any) -> None:
        self.tables: list[tuple[Any, Any]] = []  # a container or an object's attributes, and a copy
        self.placed: set[int] = set()  # ids of the tables changed by placing a model
        self.hooks: set[int] = set()  # ids of modules' tables of hooks
        self.cells: list[tuple[str, types.CellType, Any]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.caches: list[tuple[Any, Any]] = []  # functions under lru_cache
        self.generators: list[tuple[Callable[[Any], Any], Any]] = []  # function to restore a state, and the state
        seen: dict[int, Any] = {}
        todo = [(root, _DEPTH) for root in roots]
        while todo:
            value, depth = todo.pop()
            own = type(value).__module__.startswith("dp_partition.")  # another step, say
            if isinstance(value, _OPAQUE) or own or id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                depth = _DEPTH  # modules nest deeply
                self.hooks |= {id(table) for key, table in vars(value).items() if "_hooks" in key}
                self.placed |= {id(value._parameters), id(value._buffers)}
            if isinstance(value, Optimizer):
                self.placed |= {id(vars(value)), id(value.state), *map(id, value.state.values())}
                self.placed |= {id(one) for group in value.param_groups for one in (group, group["params"])}
            if (drawn := _random_state(value)) is not None:
                self.generators.append(drawn)
                continue
            if isinstance(value, functools._lru_cache_wrapper):
                self.caches.append((value, value.cache_info().currsize))
            table = value if isinstance(value, _CONTAINERS) else _attributes(value)
            if table is not None:
                self.tables.append((table, table.copy()))
            if depth:
                todo += [(member, depth - 1) for member in self._members(value)]

    def changes(self) -> list[str]:
        """Return names of changed counters, flags and other plain values, with both values."""
        now = [(name, before, _contents(cell)) for name, cell, before in self.cells]
        now += [(name, before, table.get(name)) for table, name, before in self.globals]
        for table, before in self.tables:
            if isinstance(table, dict) and id(table) not in self.placed:
                now += [(key, before.get(key), table.get(key)) for key in table]
        # What was None, or not there, is filled in: a cache.
        others = [(n, a, b) for n, a, b in now if a is not b and a is not None and isinstance(a, PLAIN) and a != b]
        return [f"{name} ({a!r} -> {b!r})" for name, a, b in others][:5]

    def restore_hooks(self) -> None:
        """Remove hooks registered by a forward, and empty caches that may hold fake tensors.

        A successful trace is the first call's run of the step's Python: its counters and draws stay, or
        the check would find the same values in each call. Attributes of modules are restored in any case, and hooks
        with them: a library with an attribute for its registered hooks would register them twice.
        """
        for table, before in self.tables:
            if id(table) in self.hooks and not _same([*table.values()], [*before.values()]):
                table.clear()
                table.update(before)
        for cached, size in self.caches:
            if cached.cache_info().currsize != size:
                cached.cache_clear()

    def restore(self, *, is_placed: bool = False) -> None:
        """Restore replaced objects, in place: the step runs once more, from the beginning.

        Args:
            is_placed: Leave parameters, buffers and optimizers alone: they were placed since.
        """
        self.restore_hooks()
        for _, cell, before in self.cells:
            if _contents(cell) is not before and before is not _EMPTY:
                cell.cell_contents = before
        for table, name, before in self.globals:
            if table.get(name) is not before:
                table[name] = before
        for table, before in self.tables:
            if is_placed and id(table) in self.placed:
                continue
            if isinstance(table, dict):
                if "_opt_called" in table:  # a scheduler's mark of a step: the graph steps without a call
                    before["_opt_called"] = table["_opt_called"]
                if not _same([*table, *table.values()], [*before, *before.values()]):
                    table.clear()
                    table.update(before)
            elif isinstance(table, set):
                table.intersection_update(before)
                table.update(before)
            elif not _same(table, before):
                table.clear()
                table.extend(before)
        for put_back, state in self.generators:
            put_back(state)

    def _members(self, value: Any) -> Iterable[Any]:
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.BuiltinMethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return [value.__wrapped__]
        if isinstance(value, dict):
            return list(value.values())[:_MOST_MEMBERS]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return list(value)[:_MOST_MEMBERS]
        members = list((_attributes(value) or {}).values())
        if callable(value) and not isinstance(value, nn.Module | Optimizer):
            members.append(type(value).__call__)
        return members

    def _of_function(self, function: types.FunctionType) -> Iterable[Any]:
        """Return contents of cells, defaults, and globals in a function's code; nothing of installed libraries."""
        source = getattr(sys.modules.get(function.__module__ or ""), "__file__", None) or ""
        if "site-packages" in source or "dist-packages" in source:
            return []
        cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.cells += [(name, cell, _contents(cell)) for name, cell in cells]
        table = function.__globals__
        self.globals += [(table, name, table[name]) for name in names_used(function) if name in table]
        members = [function.__defaults__, function.__kwdefaults__, vars(function)]
        members += [_contents(cell) for _, cell in cells]
        return members + [table[name] for name in names_used(function) if name in table]


def _random_state(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return the restoring function and the state of a generator of Python or NumPy; None for everything else."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    bits = getattr(value, "bit_generator", None)
    if hasattr(bits, "state"):
        return functools.partial(setattr, bits, "state"), copy.deepcopy(bits.state)  # type: ignore[union-attr]
    return None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, a module or an optimizer; None for functions and objects without any."""
    table = getattr(value, "__dict__", None)
    return table if isinstance(table, dict) and not isinstance(value, types.FunctionType) else None
