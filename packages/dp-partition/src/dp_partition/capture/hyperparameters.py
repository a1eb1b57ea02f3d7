"""Hyperparameters as inputs: numbers of ``param_groups`` and of optimizer state stay live in the graph.

Each becomes a symbol while the step is traced. Arithmetic on it is recorded with exactly the operations of eager mode,
so results are the same bit for bit; a condition on it (``if weight_decay != 0``) becomes a guard, checked when the
value changes. A number that the step computes from them, such as its own count of steps, is an output of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.capture.fingerprint import fingerprint

FUSED_ARGUMENTS = ("lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay")
_OF_SCHEDULERS = frozenset(["initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"])  # no step reads these
_OF_OPTIMIZERS = frozenset(["defaults", "state", "param_groups"])  # of every optimizer, as are tables of its hooks
_HOOK_TABLES = "_optimizer_"
_LIVE_INTEGERS = frozenset(["lr", "weight_decay", "momentum", "eps"])
_SYMBOLS = (torch.SymInt, torch.SymFloat)


class Hyperparameter(NamedTuple):
    """One live number: ``optimizers[optimizer].param_groups[group][key]``, or its element ``element`` (betas).

    With ``param`` it is entry ``key`` of the state of the group's parameter of this index.
    """

    optimizer: int
    group: int
    key: str
    element: int | None = None
    param: int | None = None

    @property
    def label(self) -> str:
        tail = "" if self.element is None else str(self.element)
        owner = "" if self.param is None else f"_param{self.param}"
        return f"optim{self.optimizer}_group{self.group}{owner}_{self.key}{tail}"


@dataclass
class OptimizerReads:
    """All values read by one call from its optimizers.

    Attributes:
        states: For each optimizer the state of a parameter by its ``id``: hashing a tensor takes torch ten times as
            long.
        values: Every live number; keys equal a `Hyperparameter`.
        key: Other dependencies of a trace: flags, names, hooks, parameters of each group, names of their state.
    """

    states: list[dict[int, Any]]
    values: dict[tuple[Any, ...], float]
    key: tuple[Any, ...]


def states_by_id(optimizers: list[Optimizer]) -> list[dict[int, Any]]:
    by_id = []
    for optimizer in optimizers:
        states = {}
        for param, state in optimizer.state.items():
            states[id(param)] = state
        by_id.append(states)
    return by_id


def read_optimizers(optimizers: list[Optimizer], states: list[dict[int, Any]] | None = None) -> OptimizerReads:
    """Read all hyperparameters and names of state, in one pass: this runs at every call."""
    states = states_by_id(optimizers) if states is None else states
    values: dict[tuple[Any, ...], float] = {}
    parts: list[Any] = []  # flat: compared in every call
    for number, optimizer in enumerate(optimizers):
        optimizer_states = states[number]
        has_counts = not type(optimizer).__module__.startswith("torch.")  # torch counts in tensors
        for index, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                state = optimizer_states.get(id(param), {})
                parts += (id(param), _names(tuple(state)))
                for key, one in state.items() if has_counts else ():
                    if type(one) in (int, float):
                        values[number, index, key, None, place] = one
                        parts += (key, type(one))
            for key in sorted(group):
                value = group[key]
                if key == "params" or key == "param_names" or key in _OF_SCHEDULERS:
                    continue
                several = isinstance(value, tuple | list)
                for position, one in enumerate(value if several else (value,)):
                    element = position if several else None  # betas
                    is_number = isinstance(one, torch.Tensor) and one.numel() == 1 and one.is_floating_point()
                    if type(one) in (bool, type(None)):
                        parts += (key, element, one)
                    # Inputs, not part of the key: also integers and tensors that schedulers change.
                    elif isinstance(one, float) or is_number or (isinstance(one, int) and key in _LIVE_INTEGERS):
                        values[number, index, key, element, None] = float(one)
                    elif type(one) is int:
                        values[number, index, key, element, None] = one
                        parts += (key, element, int)
                    elif isinstance(one, torch.Tensor):
                        parts += (key, element, tuple(one.shape), one.dtype, one.device)
                    else:
                        parts += (key, element, _hashable(one))
        parts += (type(optimizer).__qualname__, optimizer_attributes(optimizer))
    return OptimizerReads(states, values, tuple(parts))


@functools.lru_cache
def _names(keys: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(sorted(map(str, keys)))


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def optimizer_attributes(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return hooks, and attributes of custom optimizer classes. torch's schedulers write private ones."""
    parts: list[Any] = []
    for key, value in vars(optimizer).items():
        if key[0] != "_" and isinstance(value, bool | int | float | str):
            parts += (key, value)
        elif isinstance(value, list | tuple | dict | set):
            if key not in _OF_OPTIMIZERS and not key.startswith(_HOOK_TABLES):
                parts += (key, fingerprint([value]))
        elif callable(value) and getattr(value, "__wrapped__", None) is not getattr(type(optimizer), key, None):
            parts += (key, id(value), value)  # a `step` in place of the class's, but not a scheduler's counter
    for table in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for hook in table.values():
            parts += (id(hook), hook)  # held, so its id is not reused
    return tuple(parts)


@contextmanager
def changes_recorded(optimizers: list[Optimizer]) -> Iterator[dict[Hyperparameter, Any]]:
    """Yield a table for the numbers of parameter groups computed by the block. They become outputs of the graph.

    Raises:
        PlanError: With every other change of a group (code ``hyperparameter-changed``): a constant would be the same in
            each call.
    """
    tables = [(optimizer, list(optimizer.param_groups)) for optimizer in optimizers]
    groups = [
        (number, index, group, dict(group))
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    ]
    written: dict[Hyperparameter, Any] = {}
    yield written
    problems: list[Problem] = []
    hint = "call the scheduler, or change the value, between steps: it is read again at every call"
    for number, index, group, old in groups:
        for key in sorted(key for key in old.keys() | group.keys() if group.get(key) is not old.get(key)):
            if isinstance(group.get(key), _SYMBOLS) and isinstance(old.get(key), _SYMBOLS):
                written[Hyperparameter(number, index, key)] = group[key]
                continue
            name = f"optim{number}.param_groups[{index}][{key!r}]"
            problems.append(Problem("hyperparameter-changed", name, found="the step changes it", hint=hint))
    for number, (optimizer, table) in enumerate(tables):
        if [*map(id, optimizer.param_groups)] != [*map(id, table)]:
            optimizer.param_groups[:] = table
            reason = "the step adds or removes a group"
            problems.append(Problem("hyperparameter-changed", f"optim{number}", found=reason, hint=hint))
    if problems:
        raise PlanError(problems, "the step changes hyperparameters")
