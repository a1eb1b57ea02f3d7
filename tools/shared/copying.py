"""Copy a function or an object with everything it works on: closure, model, optimizer, schedulers, arguments.

One pass of pickle's machinery keeps identity (a parameter in the model, in ``param_groups`` and in a closure is
one object in the copy, too). Pickle alone would refuse closures and lose an optimizer's hooks; both are reduced here.
Tensors never pass through the byte stream.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ._torch_compat import FakeTensor, OpOverload, local_of
from .function_names import contents, names_used
from .stale_parameters import StaleParameter

Transform = Callable[[torch.Tensor], torch.Tensor]
Plain = Callable[[Any], tuple[type, dict[str, Any]]]

_CALLS = (types.BuiltinFunctionType, functools._lru_cache_wrapper, types.MethodWrapperType, OpOverload)
# Code, types and handles to unique objects; a copy of them would mean nothing.
_SHARED = (
    type, types.ModuleType, types.CodeType, StaleParameter, FakeTensor, DeviceMesh, dist.ProcessGroup, torch.Stream,
    # Both runs may hold a lock, one after the other, and write to one log.
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    io.IOBase, logging.Logger, logging.Handler,
)  # fmt: skip


class CannotCopyError(Exception):
    """An object cannot be copied, such as a generator that has been started."""


def class_and_attributes(value: Any) -> tuple[type, dict[str, Any]]:
    """Return the class and the attributes of an object, as its copy gets them."""
    return type(value), dict(vars(value))


class Copier:
    """Copies object graphs, all under one memo.

    Args:
        replaced: Replacements of tensors, by ``id``: plain full tensors for placed ones.
        transform: Applied to each copied tensor.
        shared: Classes of further objects that the copy shares with the original.
        owned: Modules and optimizers by ``id`` that a function may name as globals: it gets copies of them, too.
        plain: Class and attributes of the copy of a module, an optimizer or a gradient scaler, from the original: a
            module in FSDP2's shards is copied without them if ``replaced`` has its full parameters.
    """

    def __init__(
        self,
        replaced: dict[int, torch.Tensor],
        transform: Transform | None = None,
        owned: Collection[int] = (),
        plain: Plain = class_and_attributes,
        shared: tuple[type, ...] = (),
    ) -> None:
        self.owned, self.plain, self.shared = owned, plain, (*_SHARED, *shared)
        self.transform = transform or (lambda tensor: tensor)
        self.handed: list[Any] = []  # objects named in the stream by index
        self.index: dict[int, int] = {}
        self.held: list[Any] = []  # alive: no id is reused while copying
        # Contents to copy, and how to put the copy into its place: they may name the object around them.
        self.later: list[tuple[Callable[[], tuple[Any, ...]], Callable[[Any], Any]]] = []
        self.shared_ids: set[int] = set()
        self.replaced = replaced

    def copy(self, value: Any) -> Any:
        """Return a copy without memory or mutable objects of the original.

        Raises:
            CannotCopyError: With the reason.
        """
        stream = io.BytesIO()
        pickler = _Pickler(stream, self)
        try:
            pickler.dump(value)
            for contents, _ in self.later:  # grows meanwhile
                pickler.dump(contents())
            stream.seek(0)
            unpickler = _Unpickler(stream, self)
            result = unpickler.load()
            for _, fill in self.later:
                for one in unpickler.load():
                    fill(one)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CannotCopyError(f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error
        return result

    def hand(self, original: Any, stand_in: Any) -> int:
        """Name an object by an index of the stream."""
        if id(original) not in self.index:
            self.index[id(original)] = len(self.handed)
            self.handed.append(stand_in)
            self.held.append(original)
        return self.index[id(original)]

    def persistent(self, value: Any) -> int | None:
        """Return the index of an object outside of the stream; None for one within it."""
        kind = type(value)
        if kind in _PLAIN and id(value) not in self.shared_ids:  # a function's globals are shared
            return None
        if id(value) in self.index:
            return self.index[id(value)]
        if isinstance(value, self.shared) or id(value) in self.shared_ids:
            return self.hand(value, value)
        if isinstance(value, torch.Tensor):
            return self.hand(value, self._tensor(value))
        if isinstance(value, torch.Generator):
            # The run's own draws come from the default one: it is restored, not copied.
            is_default = value is torch.default_generator
            return self.hand(value, value if is_default else torch.Generator(value.device).set_state(value.get_state()))
        if kind is types.CellType:
            cell = types.CellType()
            held = contents(value, _Nothing)  # as it is now: it may name the function around it
            if held is not _Nothing:
                self.later.append((lambda: (held,), functools.partial(setattr, cell, "cell_contents")))
            return self.hand(value, cell)
        if kind is types.FunctionType and not self.owned_globals(value):
            target: Any = sys.modules.get(value.__module__ or "")
            for part in value.__qualname__.split("."):
                target = getattr(target, part, None)
            # Importable under its name, or without state.
            is_bare = value.__closure__ is None and not value.__defaults__ and not vars(value)
            if target is value or is_bare:
                return self.hand(value, value)
        if isinstance(value, _CALLS) and isinstance(getattr(value, "__self__", None), types.ModuleType | None):
            return self.hand(value, value)
        return None

    def owned_globals(self, function: types.FunctionType) -> dict[str, Any]:
        """Return the globals that a function names, of those that the copied step works on."""
        if not self.owned:
            return {}
        table = function.__globals__
        return {name: table[name] for name in names_used(function) if name in table and id(table[name]) in self.owned}

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        replacement = self.replaced.get(id(value))
        if replacement is not None:
            return replacement
        source = local_of(value) if isinstance(value, DTensor) else value
        if source.layout == torch.strided and source.numel() and not source.untyped_storage().nbytes():
            raise RuntimeError("it reaches memory that FSDP2 has freed")  # reading it would end the process
        copied = self.transform(source.detach().clone())
        if isinstance(value, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, value.requires_grad)
        else:
            copied.requires_grad_(value.requires_grad)
        if value.is_leaf and value.grad is not None:
            copied.grad = self.transform(value.grad.detach().clone())
        if own := {key: one for key, one in vars(value).items() if key not in vars(copied) and key != "_is_param"}:
            self.later.append((lambda: (own,), vars(copied).update))  # a step may read them
        return copied


_OF_MODULES = frozenset(vars(torch.nn.Module()))
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset])


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, copier: Copier) -> None:
        super().__init__(stream, protocol=5)
        self.copier = copier

    def persistent_id(self, obj: Any) -> int | None:
        return self.copier.persistent(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType:
            own = self.copier.owned_globals(obj)
            names = (obj.__module__, obj.__qualname__, obj.__doc__)
            # `functools.wraps` gives a compiled model's forward the model's attributes, FSDP2's hooks among them.
            attributes = {key: one for key, one in vars(obj).items() if key not in _OF_MODULES}
            state = (obj.__defaults__, obj.__kwdefaults__, attributes, *names, own)
            table = dict(obj.__globals__) if own else obj.__globals__
            self.copier.shared_ids.add(id(table))
            arguments = (obj.__code__, table, obj.__name__, None, obj.__closure__)
            return types.FunctionType, arguments, state, None, None, _fill_function
        if kind is types.MethodType:
            return types.MethodType, (obj.__func__, obj.__self__)
        if isinstance(obj, weakref.ref) and not isinstance(obj, weakref.WeakMethod):
            target = obj()
            return weakref.ref, (_Nothing if target is None else target,)
        # These drop attributes when pickled (hooks, the scale of a running step), or refuse (parametrizations).
        if isinstance(obj, torch.nn.Module | Optimizer | torch.amp.GradScaler):
            kind, own = self.copier.plain(obj)
            return object.__new__, (kind,), own, None, None, lambda new, own: new.__dict__.update(own)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, copier: Copier) -> None:
        super().__init__(stream)
        self.copier = copier

    def persistent_load(self, pid: Any) -> Any:
        return self.copier.handed[pid]


class _Nothing:
    """Target of dead weak references."""


def _fill_function(function: Any, state: tuple[Any, ...]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state[:3]
    function.__module__, function.__qualname__, function.__doc__ = state[3:6]
    function.__globals__.update(state[6])  # empty for a table that is shared
    vars(function).update(attributes)
