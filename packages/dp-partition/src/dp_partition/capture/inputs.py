"""Values of one call: its arguments, and the numbers of its optimizers.

Pytree opens registered types only (lists, dicts, named tuples, Hugging Face's outputs). A dataclass, a
``UserDict`` or a ``BatchEncoding`` is a leaf to it, and would be a constant of the trace. Such a leaf is replaced by an
`Opened` one, and restored for the step's Python: tensors in it become inputs of the graph.

Numbers of ``param_groups`` and of optimizer state stay live in the graph. Each becomes a symbol while the step is
traced. Arithmetic on it is recorded with exactly the operations of eager mode, so results are the same bit for bit; a
condition on it (``if weight_decay != 0``) becomes a guard, checked when the value changes. A number that the step
computes from them, such as its own count of steps, is an output of the graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.fingerprint import ById, attributes_of, fingerprint
from dp_partition.capture.reach import Reach
from dp_partition.nodes import Hyperparameter

_PLAIN_TYPES = (
    torch.Tensor, nn.Module, Optimizer, torch.Generator, type, bool, int, float, complex, str, bytes, type(None)
)  # fmt: skip


_CODE = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial, Iterator)


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


pytree.register_pytree_node(Opened, lambda x: (x.values, x.shell), lambda values, shell: Opened(shell, list(values)))


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, Mapping):
        owner[key] = value  # type: ignore[index]  # mappings without this cannot be opened
    else:
        object.__setattr__(owner, key, value)  # frozen dataclasses too


@dataclasses.dataclass(slots=True)
class CallArguments:
    """The arguments of one call, read once."""

    args: tuple[Any, ...]  # positional arguments, dataclasses and mappings opened; ``kwargs`` likewise
    kwargs: dict[str, Any]
    leaves: list[Any]  # both, flattened; ``spec`` is their structure
    spec: Any
    live: frozenset[int] = frozenset()  # positions of numbers that are inputs of the graph
    marked: tuple[int, ...] = ()  # dims of tensors whose sizes are symbols of a trace

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


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
    if hasattr(type(leaf), "__array_interface__"):  # of NumPy, or with its memory interface
        raise _refused(name, f"a {type(leaf).__name__}", "pass torch.as_tensor(array)")
    if isinstance(leaf, Iterator):
        raise _refused(
            name,
            f"{type(leaf).__name__}: tracing would take one value from it, and every call would reuse that value",
            "call next() outside, and pass what it gives",
        )
    values = _fields(leaf)
    if values is None:
        tokens = () if callable(leaf) else fingerprint([leaf, *attributes_of(leaf).values()])
        if any(isinstance(item, ById) and isinstance(item.held, torch.Tensor) for item in tokens):
            raise _refused(
                name,
                f"a {type(leaf).__name__} that holds tensors, which would be constants of the trace",
                "make it a dataclass or a dict, or register it with torch.utils._pytree.register_pytree_node",
            )
        return leaf
    return _opened(leaf, values, lambda value: _open_leaves(name, *pytree.tree_flatten(value)))


def _fields(leaf: Any) -> dict[Any, Any] | None:
    """Return the values of a dataclass or a mapping; None for another object."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(leaf) if isinstance(leaf, Mapping) and hasattr(type(leaf), "__setitem__") else None


def _opened(leaf: Any, values: dict[Any, Any], inside: Callable[[Any], Any]) -> Opened:
    empty = copy.copy(leaf)
    for key in values:
        _put(empty, key, None)
    shell = _Shell(type(leaf), tuple(values), fingerprint([empty]), empty)
    return Opened(shell, [inside(value) for value in values.values()])


def open_result(result: Any, depth: int = 8) -> Any:
    """Return a step's result with the tensors in it open to pytree, whatever objects hold them.

    Dataclasses and mappings are opened as among the arguments, and so are other objects, such as a namespace or a
    distribution, by their attributes and slots. `close_arguments` gives the step's own form back.
    """
    leaves, spec = pytree.tree_flatten(result)
    if depth < 0 or all(isinstance(leaf, _PLAIN_TYPES) for leaf in leaves):
        return result

    def opened(leaf: Any) -> Any:
        if isinstance(leaf, (*_PLAIN_TYPES, *_CODE)):
            return leaf
        values = _fields(leaf)
        if values is None:
            values = attributes_of(leaf)
            reached = Reach(list(values.values()))
            if not reached.tensors or reached.modules:  # an optimizer, say, or the model itself
                return leaf
        return _opened(leaf, values, lambda value: open_result(value, depth - 1))

    return pytree.tree_unflatten(list(map(opened, leaves)), spec)


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
        for key, item in zip(value.shell.keys, value.values, strict=True):
            _put(closed, key, close_arguments(item))
        return closed

    return pytree.tree_map(close, arguments, is_leaf=is_opened)


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for calls with opened arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = close_arguments((args, kwargs))
        return function(*args, **kwargs)

    return functools.wraps(function)(call)


FUSED_ARGUMENTS = ("lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay")
_OF_SCHEDULERS = frozenset(["initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"])  # no step reads these
_OF_OPTIMIZERS = frozenset(["defaults", "state", "param_groups"])  # of every optimizer, as are tables of its hooks
_HOOK_TABLES = "_optimizer_"
_LIVE_INTEGERS = frozenset(["lr", "weight_decay", "momentum", "eps"])
SYMBOLS = (torch.SymInt, torch.SymFloat)


@dataclasses.dataclass
class OptimizerReads:
    """All values read by one call from its optimizers."""

    # for each optimizer the state of a parameter by its ``id``: hashing a tensor takes torch ten times as long
    states: list[dict[int, Any]]
    values: dict[tuple[Any, ...], float]  # every live number; keys equal a `Hyperparameter`
    # other dependencies of a trace: flags, names, hooks, parameters of each group, names of their state
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
                for key, item in state.items() if has_counts else ():
                    if type(item) in (int, float):
                        values[number, index, key, None, place] = item
                        parts += (key, type(item))
            for key in sorted(group):
                value = group[key]
                if key == "params" or key == "param_names" or key in _OF_SCHEDULERS:
                    continue
                several = isinstance(value, tuple | list)
                for position, item in enumerate(value if several else (value,)):
                    element = position if several else None  # betas
                    is_number = isinstance(item, torch.Tensor) and item.numel() == 1 and item.is_floating_point()
                    if type(item) in (bool, type(None)):
                        parts += (key, element, item)
                    # Inputs, not part of the key: also integers and tensors that schedulers change.
                    elif isinstance(item, float) or is_number or (isinstance(item, int) and key in _LIVE_INTEGERS):
                        values[number, index, key, element, None] = float(item)
                    elif type(item) is int:
                        values[number, index, key, element, None] = item
                        parts += (key, element, int)
                    elif isinstance(item, torch.Tensor):
                        parts += (key, element, tuple(item.shape), item.dtype, item.device)
                    else:
                        parts += (key, element, fingerprint([item]))
        parts += (type(optimizer).__qualname__, optimizer_attributes(optimizer))
    return OptimizerReads(states, values, tuple(parts))


@functools.lru_cache
def _names(keys: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(sorted(map(str, keys)))


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
            if isinstance(group.get(key), SYMBOLS) and isinstance(old.get(key), SYMBOLS):
                written[Hyperparameter(number, index, key)] = group[key]
                continue
            problems.append(
                Problem(
                    "hyperparameter-changed",
                    f"optim{number}.param_groups[{index}][{key!r}]",
                    found="the step changes it",
                    hint=hint,
                )
            )
    for number, (optimizer, table) in enumerate(tables):
        if [*map(id, optimizer.param_groups)] != [*map(id, table)]:
            optimizer.param_groups[:] = table
            problems.append(
                Problem("hyperparameter-changed", f"optim{number}", found="the step adds or removes a group", hint=hint)
            )
    if problems:
        raise PlanError(problems, "the step changes hyperparameters")
