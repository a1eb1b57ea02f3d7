"""All objects within reach of a step (arguments, bound objects, closures, globals), and their values for a restore.

A step may keep its model and optimizers in its arguments, in ``self``, a closure or a global.

A failed trace has run the step once more than requested. Its changes of lists, dicts and counters
would be changes without a call, and a fake tensor in one of them would fail in the next eager use.
"""

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import logging
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition._shared.function_names import contents, names_used
from dp_partition.capture.fingerprint import PLAIN

_LEAVES = (str, bytes, int, float, complex, torch.Tensor, type, types.ModuleType, torch.dtype, torch.device,
           DeviceMesh, dist.ProcessGroup, torch.Generator, io.IOBase, logging.Logger)  # fmt: skip
_LISTS = (list, tuple, set, frozenset, collections.deque)
_LIBRARIES = ("torch", "numpy", "builtins", "dp_partition")
_MOST = 10_000  # searched entries of one container; below, the searched depth
_DEPTH = 8


class Reach:
    """Objects within reach of a step, in the same order on all ranks."""

    def __init__(self, *roots: Any) -> None:
        self.optimizers: list[Optimizer] = []  # all optimizers
        self.tables: list[Any] = []  # mutable containers, and ``vars`` of objects, modules and optimizers
        # names of types of iterators, and of the operating system's random numbers: two runs take two values
        self.iterators: list[str] = []
        self.tensors: list[torch.Tensor] = []  # tensors in containers and attributes, one or several times
        # mappings, lists, tuples and sets; an optimizer's state, keyed by its parameters, is none
        self.containers: list[Any] = []
        self._modules: list[nn.Module] = []
        self.seen: dict[int, Any] = {}  # everything met, in order, by id; held, so no id is used again
        self._visit(list(roots), _DEPTH)
        inside = {id(child) for module in self._modules for child in module.modules() if child is not module}
        outermost = [module for module in self._modules if id(module) not in inside]  # named through their parents
        # modules with parameters, none inside another; wrappers without parameters of their own are entered
        self.modules = [m for module in outermost for m in _with_parameters(module)]

    @property
    def states(self) -> list[torch.Tensor]:
        entries = [x for o in self.optimizers for state in o.state.values() for x in state.values()]
        return [x for x in entries if isinstance(x, torch.Tensor)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return unique parameters by name, those of modules first; several modules are prefixed by class.

        Trained tensors outside of modules and optimizers count only if there is nothing else: beside a model, one that
        requires gradients may be this rank's own (a perturbation, an image).
        """
        named: dict[int, tuple[str, Any]] = {}
        for index, module in enumerate(self.modules):
            prefix = f"{type(module).__name__}{index}." if len(self.modules) > 1 else ""
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (prefix + name, parameter))
        for number, optimizer in enumerate(self.optimizers):
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(listed):
                named.setdefault(id(parameter), (f"optimizer{number}[{place}]", parameter))
        if not named:
            trained = {id(x): x for x in self.tensors if x.is_leaf and x.requires_grad}
            return {f"tensor{number}": tensor for number, tensor in enumerate(trained.values())}  # type: ignore[misc]
        return dict(named.values())

    def identities(self, parameters: Iterable[torch.Tensor], keys: tuple[type, ...]) -> set[int]:
        """Return ids of parameters that a container holds as numbers, or as members of ``keys``.

        A copy, a fake or a shard in place of such a parameter is another object: a look-up would miss it.
        """
        sized = [p for p in parameters if not isinstance(p, nn.UninitializedParameter)]
        numbers = {number: id(p) for p in sized for number in (id(p), p.data_ptr()) if number}
        ids = set(numbers.values())
        result: set[int] = set()
        for container in self.containers:
            is_keyed = isinstance(container, keys)
            values: Iterable[Any] = container.values() if isinstance(container, dict) else ()
            result |= {id(x) for x in itertools.islice(container, _MOST) if is_keyed and id(x) in ids}
            every = itertools.chain(itertools.islice(container, _MOST), itertools.islice(values, _MOST))
            result |= {numbers[x] for x in every if type(x) is int and x in numbers}
        return result

    def repoint(
        self, swap: Mapping[int, tuple[torch.Tensor, torch.Tensor]], convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Replace old tensors, such as parameters, by new ones, in groups, state, lists and dicts.

        ``swap`` has both by the old one's ``id``; ``convert`` takes state of a parameter's shape to the layout of the
        new one.
        """

        def new(value: Any) -> Any:
            return swap[id(value)][1] if id(value) in swap else value

        for table in self.tables:
            if isinstance(table, list | collections.deque) and any(id(value) in swap for value in table):
                values = [new(value) for value in table]
                table.clear()  # in place: other objects hold the list
                table.extend(values)
            elif isinstance(table, set) and any(id(value) in swap for value in table):
                members = [new(value) for value in table]
                table.clear()
                table.update(members)
            elif isinstance(table, dict) and any(id(k) in swap or id(v) in swap for k, v in table.items()):
                items = [(key, new(key), new(value)) for key, value in table.items()]
                table.clear()
                for old, key, value in items:
                    if key is not old and isinstance(value, dict):  # state of an optimizer
                        for entry, x in value.items():
                            if isinstance(x, torch.Tensor) and x.ndim and x.shape == key.shape:
                                value[entry] = convert(x)
                    table[key] = value

    def _visit(self, value: Any, depth: int) -> None:
        if depth < 0 or value is None or isinstance(value, _LEAVES) or id(value) in self.seen:
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            return
        if type(value).__module__.startswith("dp_partition."):
            return  # another step, say
        self.seen[id(value)] = value
        depth = _DEPTH if isinstance(value, nn.Module) else depth  # modules nest deeply
        for inner in self._inside(value):
            self._visit(inner, depth - 1)

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            return [value.__self__]
        if isinstance(value, types.FunctionType):
            if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
                return []  # not the step's own code
            used = [value.__globals__[name] for name in sorted(names_used(value)) if name in value.__globals__]
            cells, defaults = map(contents, value.__closure__ or ()), value.__defaults__ or ()
            return [*used, *cells, *defaults, *vars(value).values()]
        if isinstance(value, functools._lru_cache_wrapper):
            return [value.__wrapped__]
        if isinstance(value, nn.Module):
            if "_orig_mod" in value._modules:  # in `torch.compile`: the module itself is sharded, and runs compiled
                return [value._modules["_orig_mod"]]
            self._modules.append(value)
            self.tables.append(vars(value))
            return [*(v for k, v in vars(value).items() if not k.startswith("_")), *value.children()]
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            self.tables += [vars(value), value.state, *value.state.values(), *value.param_groups]
            return [v for k, v in vars(value).items() if k != "state"]
        if isinstance(value, dict):
            self.tables.append(value)
            self.containers.append(value)
            return list(value.values())[:_MOST]
        if isinstance(value, _LISTS):
            self.tables += [value] if not isinstance(value, tuple | frozenset) else []
            self.containers.append(value)
            return list(value)[:_MOST]
        if isinstance(value, Iterator | random.SystemRandom):
            self.iterators.append(type(value).__name__)
            return []  # a look inside would consume an iterator
        inside: list[Any] = [type(value).__call__] if callable(value) else []
        if isinstance(value, collections.abc.Mapping):
            inside += itertools.islice(value.values(), _MOST)
        if hasattr(value, "__dict__"):
            self.tables.append(vars(value))
            inside += vars(value).values()
        return inside


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    if next(module.parameters(recurse=False), None) is None and isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [item for child in module.children() for item in _with_parameters(child)]
    return [module] if next(module.parameters(), None) is not None else []


_EMPTY = object()


class PythonState:
    """Contents of all containers, objects, cells and globals within a step's reach."""

    def __init__(self, *roots: Any) -> None:
        reach = Reach(*roots)
        tables: list[Any] = [x for x in reach.tables if isinstance(x, dict | list | set | collections.deque)]
        self.placed: set[int] = set()  # ids of the tables changed by placing a model
        self.hooks: set[int] = set()  # ids of modules' tables of hooks
        self.attributes: set[int] = set()  # ids of modules' own tables
        self.cells: list[tuple[str, types.CellType, Any]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.caches: list[tuple[Any, Any]] = []  # functions under lru_cache
        self.generators: list[tuple[Any, Any, Any]] = []  # functions to read and to restore a state, and the state
        for value in list(reach.seen.values()):
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
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # it has no state
                self.generators.append((value.getstate, value.setstate, value.getstate()))
            elif type(value).__module__.startswith("numpy.random"):  # others may raise KeyError in `__getattr__`
                bits = getattr(value, "bit_generator", None) or value._bit_generator  # an old `RandomState` has this
                access = functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
                self.generators.append((*access, copy.deepcopy(bits.state)))
        for optimizer in reach.optimizers:
            self.placed |= {id(vars(optimizer)), id(optimizer.state), *map(id, optimizer.state.values())}
            self.placed |= {id(item) for group in optimizer.param_groups for item in (group, group["params"])}
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
        names += ["a random generator" for read, _, state in self.generators if repr(read()) != repr(state)]  # it drew
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
        for _, put_back, state in self.generators:
            put_back(state)


def _same(item: Any, other: Any) -> bool:
    return len(item) == len(other) and all(a is b for a, b in zip(item, other, strict=True))
