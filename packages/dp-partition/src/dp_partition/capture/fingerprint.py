"""Fingerprints of the Python values read by a step: part of a trace's key.

A trace burns these values in, so a call finds its trace only if all of them are unchanged. Covered are
the step's arguments, attributes of modules, and values read by the step's function and the functions it names: cells,
defaults, ``__self__``, context variables, the globals that they name, and ``os.environ`` and functions of libraries.
Of an object's attributes only those named by these functions count: a list of past losses may grow.

Tensors, functions and arrays from 1 MiB on count by identity and are held, other values by type alone. The check by
execution finds anything missed here.
"""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import itertools
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dp_partition._shared.function_names import contents, names_used

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
PLAIN_TYPES = frozenset(PLAIN)  # without subclasses
_SEQUENCES = (list, tuple, collections.deque)
_MAPPINGS = (dict, collections.ChainMap, types.MappingProxyType, type(os.environ))
_MEMORY = (bytearray, array.array, memoryview)
_CONTAINERS = (*_SEQUENCES, *_MAPPINGS, *_MEMORY, set, frozenset, contextvars.ContextVar)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_BY_IDENTITY = (torch.Tensor, *_FUNCTIONS)
_OF_LIBRARIES = (*PLAIN, *_FUNCTIONS, types.ModuleType, type(os.environ))  # what counts of a library's modules
_NO_SETTINGS = (torch.Tensor, Optimizer, types.ModuleType, type, *_FUNCTIONS)
_DEPTH = 8
_MOST = 1_000  # entered members of one container
_MOST_BYTES = 2**20  # of arrays whose values count; larger ones count by identity alone
# Methods that no code names where they run: `config["kl"]`, `weight * loss`.
_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        "call", "getattr", "getattribute", "getitem", "iter", "next", "len", "contains", "bool", "float", "int",
        "index", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "enter", "exit",
        "missing", "get", "eq", "lt", "gt", "le", "ge",
    )
)  # fmt: skip
_OF_TORCH = frozenset(vars(nn.Module()))


class ById:
    """An object by identity; held, so no other one gets its id."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.held is self.held


def fingerprint(
    values: Iterable[Any], names: Collection[str] | None = None, placed: Collection[int] = ()
) -> tuple[Any, ...]:
    """Return a flat, hashable picture of values: types, plain values, members of containers and settings.

    Args:
        values: Any objects; each is entered once, so that a config which many modules share costs once.
        names: The attributes of settings objects that count; None: all.
        placed: Modules by ``id`` whose tensors the step's graph writes: they count by identity alone.
    """
    tokens: list[Any] = []
    seen: set[int] = set()
    stack = [(value, _DEPTH) for value in values]
    stack.reverse()
    while stack:  # no recursion: this runs at every call
        value, depth = stack.pop()
        kind = type(value)
        tokens.append(kind)
        if kind in PLAIN_TYPES or isinstance(value, PLAIN):
            tokens.append(value)
            continue
        if isinstance(value, _BY_IDENTITY) or hasattr(kind, "__array_interface__") or isinstance(value, type):
            tokens.append(ById(value))
            if isinstance(value, functools.partial) and depth:
                stack += [(value.keywords, depth - 1), (value.args, depth - 1)]
            elif not isinstance(value, (torch.Tensor, type)) and _has_few_bytes(value):
                tokens.append(value.tobytes())  # of an array of NumPy, which code writes in place
            continue
        if depth == 0 or id(value) in seen:
            continue
        seen.add(id(value))
        members: list[Any] = []
        if isinstance(value, nn.Module):
            tokens.append(ById(value))
            if id(value) not in placed:
                tokens += [item for key, item in vars(value).items() if type(item) in PLAIN_TYPES]
                tokens += map(ById, value.buffers())
        elif isinstance(value, _MAPPINGS):
            for key in value:
                tokens.append(key if isinstance(key, PLAIN) else _key_token(key))
            members = list(value.values())
        elif isinstance(value, _SEQUENCES):
            members = list(value)
        elif isinstance(value, contextvars.ContextVar):
            members = [value.get(None)]
        elif isinstance(value, _MEMORY):
            tokens.append(bytes(value) if _has_few_bytes(memoryview(value)) else ById(value))
        elif isinstance(value, set | frozenset):
            tokens.append(frozenset([item if isinstance(item, PLAIN) else _key_token(item) for item in value]))
        elif _is_settings(value):
            attributes = attributes_of(value)
            # A scheduler's own methods read its attributes, and torch's code is not looked at.
            every = names is None or isinstance(value, LRScheduler)
            # Of a `UserDict` code reads items, which are in an attribute that it does not name.
            counted = [key for key in attributes if every or key in names or key == "data"]  # type: ignore[operator]
            tokens += counted
            members = [attributes[key] for key in counted]
        tokens.append(len(members))
        stack += [(item, depth - 1) for item in reversed(members)]
    return tuple(tokens)


def _has_few_bytes(value: Any) -> bool:
    return int(getattr(value, "nbytes", _MOST_BYTES)) < _MOST_BYTES


def _key_token(key: Any) -> Any:
    """Return the relevant part of a dict's key, or of a set's member."""
    return tuple(map(_key_token, key)) if isinstance(key, tuple) else key if isinstance(key, PLAIN) else type(key)


def _is_settings(value: Any) -> bool:
    """Return True for objects like a dataclass, a namespace, a model's config or a loss."""
    if isinstance(value, nn.Module | LRScheduler):
        return True
    if isinstance(value, _NO_SETTINGS) or type(value).__module__.startswith(("torch", "dp_partition.")):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(cast(Any, type(value))))


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of an object's slots; none for classes of libraries, whose C types declare others."""
    if not isinstance(kind, type) or _is_of_library(kind.__module__):
        return ()
    slots = [vars(item).get("__slots__", ()) for item in kind.__mro__]
    return tuple(name for row in slots for name in ([row] if isinstance(row, str) else row) if name[:2] != "__")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots included."""
    own: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slots_of(cast(Any, type(value)))
    return own | {name: getattr(value, name) for name in slots if hasattr(value, name)} if slots else own


def _counts(value: Any) -> bool:
    """Return True if a fingerprint holds more of the value than its type."""
    is_array = hasattr(type(value), "__array_interface__")
    return is_array or isinstance(value, (*PLAIN, *_CONTAINERS, *_BY_IDENTITY)) or _is_settings(value)


class FunctionReads:
    """Places outside a function, read by it and by all that its code names: functions, modules, classes and objects.

    An object that is reached counts by the attributes that the code names; its class's methods of these names are read
    as well, and the methods behind an operator, as ``__getitem__``. Names and objects are followed until none is new.

    Args:
        function: A function, method, partial or callable object; None to read ``objects`` alone.
        owner: The class of a plain function that is its method.
        objects: Further objects within reach, such as attributes of a model.
        names: Names that code elsewhere uses on them.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        owner: type | None = None,
        objects: Iterable[Any] = (),
        names: Iterable[str] = (),
    ) -> None:
        self.names: set[str] = set(names)  # every name that their code uses, of globals and of attributes
        self.past: set[str] = set()  # names of the closures' cells and globals among them that hold no function
        self._functions: list[types.FunctionType] = []  # their defaults and attributes may be replaced
        self._cells: list[types.CellType] = []
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}  # a dict, or the read-only view of a class's
        self._held: list[Any] = []  # bound objects: they cannot be replaced
        self._owners: dict[int, Any] = {}  # modules, classes and objects, whose members of a name are reached
        todo: list[tuple[Any, Any]] = [(function, owner), *((item, None) for item in objects)]
        seen: set[int] = set()
        while todo:
            while todo:
                value, owner = todo.pop()
                if id(value) not in seen:
                    seen.add(id(value))
                    todo += self._enter(value, owner)
            todo = [(x, o) for item in self._owners.values() for x, o in self._members(item) if id(x) not in seen]

    def _enter(self, value: Any, owner: Any) -> list[tuple[Any, Any]]:
        """Note the reads of a value. Return what it leads to, methods with their classes."""
        if isinstance(value, staticmethod | classmethod):
            return [(value.__func__, owner)]
        if isinstance(value, functools.partial):
            self._held += [value.args, value.keywords]
            return [(item, None) for item in (value.func, *value.args, *value.keywords.values())]
        if isinstance(value, types.MethodType):
            self._held.append(value.__self__)
            return [(value.__func__, type(value.__self__)), (value.__self__, None)]
        if isinstance(value, types.FunctionType):
            return self._enter_function(value, owner)
        if isinstance(value, functools._lru_cache_wrapper):
            return [(value.__wrapped__, owner)]
        if isinstance(value, (*_SEQUENCES, set, frozenset)):
            return [(item, None) for item in itertools.islice(value, _MOST)]
        if isinstance(value, _MAPPINGS):
            return [(item, None) for item in itertools.islice(value.values(), _MOST)]
        if isinstance(value, types.ModuleType):
            self._owners[id(value)] = value  # `os.environ`, and a function of torch may be replaced
        elif isinstance(value, type):
            if not _is_of_library(value.__module__):
                self._owners[id(value)] = value
        elif _is_settings(value) and not isinstance(value, nn.Module | LRScheduler):
            self._owners[id(value)] = value
        return []

    def _enter_function(self, function: types.FunctionType, owner: Any) -> list[tuple[Any, Any]]:
        wrapped = getattr(function, "__wrapped__", None)
        if _is_of_library(function.__module__) and function is not getattr(owner, "forward", None):
            return [(wrapped, None)]
        cells = function.__closure__ or ()
        self._cells += cells
        self._functions.append(function)
        names = names_used(function)
        self.names |= names
        table = function.__globals__
        self._note(table, (name for name in names if name in table))
        others = (wrapped, *map(contents, cells), *(function.__defaults__ or ()))
        named = [(item, None) for item in (*others, *(table[name] for name in names if name in table))]
        values = dict(zip(function.__code__.co_freevars, map(contents, cells), strict=True))
        values |= {name: table[name] for name in names if name in table}
        code = (*_FUNCTIONS, type, types.ModuleType)
        self.past |= {name for name, value in values.items() if not isinstance(value, code)}
        return [*named, (owner, None)]

    def _members(self, owner: Any) -> list[tuple[Any, Any]]:
        """Note and return what the code names of a module, a class or an object, and methods behind operators."""
        if isinstance(owner, types.ModuleType):
            table = vars(owner)
            names = [name for name in self.names if name in table]
            if _is_of_library(owner.__name__):  # `sys.modules` grows, and a method of a model may have its name
                names = [name for name in names if isinstance(table[name], _OF_LIBRARIES)]
                names += ["environ"] if "getenv" in names and owner is os else []
            self._note(table, names)
            return [(table[name], None) for name in names]
        if not isinstance(owner, type):
            own = attributes_of(owner)
            return [(type(owner), None), *((own[name], None) for name in self.names if name in own)]
        members: list[tuple[Any, Any]] = []
        for kind in owner.__mro__[:-1]:
            if _is_of_library(kind.__module__):
                continue
            table = vars(kind)  # type: ignore[assignment]  # a read-only view of a dict
            names = [n for n, item in table.items() if n in self.names or (n in _OPERATORS and callable(item))]
            self._note(table, names)
            members += [(getattr(table[name], "fget", table[name]), owner) for name in names]
        return members

    def _note(self, table: Any, names: Iterable[str]) -> None:
        for name in names:
            if _counts(table[name]) or isinstance(table[name], type):
                self._places.setdefault((id(table), name), (table, name))

    def read(self, placed: Collection[int] = ()) -> tuple[Any, ...]:
        """Return a fingerprint of the values as they are now; ``placed`` as for `fingerprint`."""
        values = [*self._held, *[table.get(key) for table, key in self._places.values()], *map(contents, self._cells)]
        for function in self._functions:
            values += (function.__defaults__, function.__kwdefaults__, vars(function))
        return fingerprint(values, self.names, placed)


_LIBRARIES = frozenset(["torch", "numpy", "dp_partition", *sys.stdlib_module_names]) - {"__main__"}


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def names_in_forward(owner: type[nn.Module]) -> frozenset[str]:
    """Return the names in a module's `forward` and in what is called by it."""
    if owner not in _forward_names:
        _forward_names[owner] = frozenset(FunctionReads(owner.forward, owner).names)
    return _forward_names[owner]


_forward_names: weakref.WeakKeyDictionary[type[nn.Module], frozenset[str]] = weakref.WeakKeyDictionary()


_ABSENT = object()


class ModuleReads:
    """Structure of modules, and their values beside parameters and buffers."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.roots = list(roots)
        self.names: frozenset[str] = frozenset()  # that the step's own code uses: it may read attributes of a model
        self.modules: list[nn.Module] = []  # the roots and all modules in them
        # attributes in which a graph leaves a tensor, by module and name, with their value in front of the first trace
        self.left: dict[tuple[nn.Module, str], Any] = {}
        # modules, their hooks, the names of their tensors, and which of those are None, at the last `look`
        self.structure: tuple[Any, ...] | None = None
        self.look()

    def follow(self, names: Iterable[str]) -> None:
        """Count attributes that the step's own code names, too."""
        if not self.names.issuperset(names):
            self.names |= frozenset(names)
            self._find_places()

    def leave(self, attributes: Iterable[tuple[nn.Module, str]]) -> None:
        """Let attributes in which a graph leaves a tensor count no more: a forward writes them before it reads them."""
        new = {place: vars(place[0]).get(place[1], _ABSENT) for place in attributes if place not in self.left}
        self.left |= new
        if new:
            self._find_places()

    def clear(self) -> None:
        """Put the attributes back in which graphs have left tensors, for a trace that starts as the first one."""
        for (module, key), value in self.left.items():
            if value is _ABSENT:
                vars(module).pop(key, None)
            else:
                vars(module)[key] = value

    def look(self) -> bool:
        """Read the structure again; return True if it has changed."""
        if self._read_structure() == self.structure:  # with all children the same, these are all modules
            return False
        self.modules = [module for root in self.roots for module in root.modules()]
        self.structure = self._read_structure()
        self._find_places()
        return True

    def _read_structure(self) -> tuple[Any, ...]:
        rows: list[Any] = []
        for m in self.modules:
            hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
            names = map(tuple, (m._modules.values(), m._parameters, m._buffers, *hooks))
            # A buffer, or the bias of nn.Linear(bias=False), that is None until a caller assigns a tensor.
            present = map(operator.is_not, (*m._parameters.values(), *m._buffers.values()), itertools.repeat(None))
            size = len(vars(m))
            if self.left:
                size -= sum(owner is m and key in vars(m) for owner, key in self.left)
            rows.append((m, size, type(m), type(m).forward, *names, *present))
        return tuple(rows)

    def _find_places(self) -> None:
        kinds = set(map(type, self.modules))
        self._names = self.names.union(*map(names_in_forward, kinds))
        self._places = [
            (vars(module), key)
            for module in self.modules
            for key, value in vars(module).items()
            if key not in _OF_TORCH and not isinstance(value, nn.Module) and _counts(value)
            if (module, key) not in self.left
            if type(value) in PLAIN_TYPES
            or key == "forward"
            or key in self.names
            or key in names_in_forward(type(module))
        ]
        objects = {id(item): item for table, key in self._places if _is_settings(item := table[key])}
        self._objects = FunctionReads(None, objects=objects.values(), names=self._names)
        self._names |= self._objects.names
        own = dict.fromkeys(k for module in self.modules for k in type(module).__mro__ if issubclass(k, nn.Module))
        self._places += [  # class attributes read by forward
            (vars(kind), key)  # type: ignore[misc]  # a read-only view of a dict
            for kind in own
            if kind.__module__.split(".")[0] != "torch"
            for key in names_in_forward(kind) | self.names
            if type(vars(kind).get(key)) in PLAIN_TYPES
        ]
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        tables = [getattr(module, name) for module in self.modules for name in hooks]
        self._hooks = [FunctionReads(hook) for table in tables for hook in table.values()]

    def read(self) -> tuple[Any, ...]:
        """Return the structure of the last `look`, and a fingerprint of the present attributes."""
        values = [table.get(key) for table, key in self._places]
        hooks = tuple([hook.read() for hook in self._hooks]) if self._hooks else ()
        return self.structure, fingerprint(values, self._names), self._objects.read(), hooks


def marked_dims(tensor: torch.Tensor, marked: tuple[int, ...]) -> list[int]:
    """Return the dims of a tensor argument with symbolic sizes. Torch treats sizes 0 and 1 apart."""
    dims = {dim % tensor.ndim for dim in marked if -tensor.ndim <= dim < tensor.ndim}
    return sorted(dim for dim in dims if tensor.shape[dim] > 1)


def leaf_key(leaf: Any, marked: tuple[int, ...] = ()) -> Any:
    """Return the part of a trace's key for one leaf of the arguments."""
    if isinstance(leaf, torch.Tensor):
        shape: Any = tuple(leaf.shape)
        stride: Any = tuple(leaf.stride())
        if marked and (dims := marked_dims(leaf, marked)):
            shape = tuple([None if dim in dims else size for dim, size in enumerate(shape)])
            stride = None if leaf.is_contiguous() else stride
        return shape, stride, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_leaf
    if isinstance(leaf, nn.Module | Optimizer):
        return id(leaf)
    if type(leaf) not in PLAIN_TYPES and _counts(leaf):
        return fingerprint([leaf])  # not by identity: attributes change, and ids come again
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf) if isinstance(leaf, slice) else None
    return type(leaf), leaf  # a generator, a fraction: held by the key
