"""Python values changed by a step while it is traced, restored afterwards.

A failed trace has run the step once more than requested. Its changes of lists, dicts and counters
would be changes without a call, and a fake tensor in one of them would fail in the next eager use.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dp_partition.capture.fingerprint import PLAIN, contents, names_used
from dp_partition.capture.reach import Reach

_EMPTY = object()


class PythonState:
    """Contents of all containers, objects, cells and globals within a step's reach.

    Args:
        roots: The step's function and its arguments.
    """

    def __init__(self, *roots: Any) -> None:
        reach = Reach(*roots)
        tables: list[Any] = [table for table in reach.tables if isinstance(table, dict | list | set | deque)]
        self.placed: set[int] = set()  # ids of the tables changed by placing a model
        self.hooks: set[int] = set()  # ids of modules' tables of hooks
        self.attributes: set[int] = set()  # ids of modules' own tables
        self.cells: list[tuple[str, types.CellType, Any]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.caches: list[tuple[Any, Any]] = []  # functions under lru_cache
        self.generators: list[tuple[Callable[[Any], Any], Any]] = []  # function to restore a state, and the state
        for value in reach.objects:
            if isinstance(value, nn.Module):
                self.attributes.add(id(vars(value)))
                own = {key: table for key, table in vars(value).items() if isinstance(table, dict)}
                self.hooks |= {id(table) for key, table in own.items() if "_hooks" in key}
                self.placed |= {id(value._parameters), id(value._buffers)}
                tables += own.values()
            elif isinstance(value, types.FunctionType):
                cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                self.cells += [(name, cell, contents(cell, _EMPTY)) for name, cell in cells]
                scope = value.__globals__
                self.globals += [(scope, name, scope[name]) for name in names_used(value) if name in scope]
            elif isinstance(value, functools._lru_cache_wrapper):
                self.caches.append((value, value.cache_info().currsize))
            elif (drawn := _random_state(value)) is not None:
                self.generators.append(drawn)
        for optimizer in reach.optimizers:
            self.placed |= {id(vars(optimizer)), id(optimizer.state), *map(id, optimizer.state.values())}
            self.placed |= {id(one) for group in optimizer.param_groups for one in (group, group["params"])}
        self.tables = [(table, table.copy()) for table in {id(table): table for table in tables}.values()]

    def changes(self) -> list[str]:
        """Return names of changed counters, flags and other plain values, with both values."""
        now = [(name, before, contents(cell, _EMPTY)) for name, cell, before in self.cells]
        now += [(name, before, table.get(name)) for table, name, before in self.globals]
        for table, before in self.tables:
            if isinstance(table, dict) and id(table) not in self.placed:
                now += [
                    (key, before.get(key), table.get(key)) for key in table if key != "training"
                ]  # the graph sets it
        # What was None, or not there, is filled in: a cache.
        others = [(n, a, b) for n, a, b in now if a is not b and a is not None and isinstance(a, PLAIN) and a != b]
        names = [f"{name} ({a!r} -> {b!r})" for name, a, b in others]
        for table, before in self.tables:
            if id(table) in self.attributes:
                replaced = [k for k, old in before.items() if isinstance(old, torch.Tensor) and table.get(k) is not old]
                names += [f"{key} (another tensor)" for key in replaced]
        return names[:5]

    def restore_modules(self) -> None:
        """Restore attributes and hooks of modules, and empty caches with fake tensors.

        A successful trace is the first call's run of the step's Python: its counters and draws stay, or
        the check would find the same values in each call. Attributes of modules may be caches of fake tensors, and
        their hooks go with them: a library with an attribute for its registered hooks would register them twice.
        """
        for table, before in self.tables:
            is_own = id(table) in self.hooks or id(table) in self.attributes
            if is_own and not _same([*table, *table.values()], [*before, *before.values()]):
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
        self.restore_modules()
        for _, cell, before in self.cells:
            if contents(cell, _EMPTY) is not before and before is not _EMPTY:
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


def _random_state(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return the restoring function and the state of a generator of Python or NumPy. None for everything else."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    bits = getattr(value, "bit_generator", None)
    if hasattr(bits, "state"):
        return functools.partial(setattr, bits, "state"), copy.deepcopy(bits.state)  # type: ignore[union-attr]
    return None


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
