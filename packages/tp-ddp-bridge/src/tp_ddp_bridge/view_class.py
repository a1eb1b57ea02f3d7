"""The class that a module gets when it is bridged.

A subclass of the module's own class, made once for each class and set of names, with one property per leaf. It keeps
the name of the class (the module prints as before), and it is where everything at the module's edge becomes global
again: state dicts, pickles, assignment.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tp_ddp_bridge.cache import ForwardScope, in_forward
from tp_ddp_bridge.loading import Loading, pre_hooks_run
from tp_ddp_bridge.marks import mark_leaves, mark_plain
from tp_ddp_bridge.shown import shown
from tp_ddp_bridge.view import View

_scope = ForwardScope()
_classes: weakref.WeakValueDictionary[tuple[type, tuple[str, ...]], type] = weakref.WeakValueDictionary()


class BridgedModule:
    """Mixin of every class that ``view_class`` makes.

    Instances hold ``_dp_views``: attribute name -> View. No ``__slots__``: ``__class__`` can only be assigned between
    classes whose instances are laid out alike.
    """

    _dp_names: ClassVar[tuple[str, ...]] = ()
    _dp_views: dict[str, View]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; within the outermost call a leaf is viewed once."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__
        with _scope:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._dp_views and isinstance(value, torch.Tensor):
            value = _assigned(self, name, value)
        super().__setattr__(name, value)
        if name in self._dp_views:
            mark_leaves(as_module(self))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``.to()`` and its kin act on the leaves; whatever replaces a leaf gets its marks."""
        for view in self._dp_views.values():
            view.forget()
        super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module._apply
        mark_leaves(as_module(self))
        mark_plain(as_module(self))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write DTensors of global shape where nn.Module writes leaves; communicates nothing."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]  # nn.Module's
        for name, view in self._dp_views.items():
            saved = destination.get(prefix + name)
            if isinstance(saved, torch.Tensor) and not isinstance(saved, DTensor):
                destination[prefix + name] = view.read(saved) if keep_vars else view.layout.wrap(saved)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Read DTensors of any layout, or full tensors, into the leaves."""
        rest = (prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not self._dp_views:
            super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]  # nn.Module's
            return
        module = as_module(self)
        with pre_hooks_run(module, state_dict, *rest):
            loading = Loading(module, state_dict, prefix, local_metadata, error_msgs)
            super()._load_from_state_dict(loading, *rest)  # type: ignore[misc]  # nn.Module's
        loading.finish()
        mark_leaves(module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module.__setstate__
        mark_leaves(as_module(self))
        mark_plain(as_module(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the module's own class plus the names of its views."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        own = type(self)
        if not args or args[0] is not own or make.__name__ != "__newobj__":
            raise TypeError(
                f"{own.__name__} pickles itself with __reduce__, which would lose the bridge's views: "
                "undo_dp_transform(module) before pickling or copying it"
            )
        return rebuild, (own.__mro__[2], own._dp_names, *args[1:]), *rest


def as_module(instance: BridgedModule) -> nn.Module:
    """The mixin's instances are modules; the type system does not know."""
    return cast(nn.Module, instance)


def rebuild(base: type[nn.Module], names: tuple[str, ...], *args: Any) -> nn.Module:
    """An empty instance of the view class of ``base``, for pickle and copy to fill."""
    made = view_class(base, names)
    instance: nn.Module = made.__new__(made, *args)
    instance.__dict__["_dp_views"] = {}
    return instance


def view_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of ``base`` that reads ``names`` as DTensors; the same class every time."""
    found = _classes.get((base, names))
    if found is not None:
        return found

    def body(namespace: dict[str, Any]) -> None:
        for name in names:
            namespace[name] = property(
                functools.partial(_read, name), functools.partial(_write, name), functools.partial(_delete, name)
            )
        namespace["__module__"] = base.__module__
        namespace["__qualname__"] = base.__qualname__
        namespace["__doc__"] = base.__doc__
        namespace["_dp_names"] = names

    made = types.new_class(base.__name__, (BridgedModule, base), {}, body)
    _classes[(base, names)] = made
    return made


# They take a parameter away from its module for good and put a computed one in its place.
_TAKERS = {
    inspect.unwrap(taker).__code__: name
    for taker, name in (
        (parametrize.register_parametrization, "parametrize.register_parametrization"),
        (WeightNorm.apply, "weight_norm"),
        (SpectralNorm.apply, "spectral_norm"),
    )
}


def _refuse_takers(name: str, self: nn.Module) -> None:
    """Raise if the caller of the property is about to take a leaf away; torch would register a view in its place."""
    taker = _TAKERS.get(sys._getframe(2).f_code)
    view: View | None = self.__dict__["_dp_views"].get(name)
    if taker is not None and view is not None:
        raise RuntimeError(
            f"{view.kind} {view.name!r} is a local leaf under the data-parallel bridge, which {taker} cannot take "
            "over: call "
            f"it before bridging, or undo_dp_transform(module), {taker}, and bridge again"
        )


def _read(name: str, self: nn.Module) -> Any:
    own = self.__dict__
    value = own["_parameters"].get(name)
    if value is None:
        value = own["_buffers"].get(name)
        if value is None:
            return _missing(name, self)
    view: View = own["_dp_views"][name]
    if torch.compiler.is_compiling():
        return view.read(value)
    try:
        if in_forward():
            return view.read(value)
        _refuse_takers(name, self)
        return shown(view.read(value), value, view.layout)
    except AttributeError as error:
        # nn.Module.__getattr__ would answer an AttributeError with the plain local leaf.
        raise RuntimeError(f"{view.kind} {view.name!r} could not be read as a DTensor: {error}") from error


def _missing(name: str, self: nn.Module) -> Any:
    own = self.__dict__
    if name in own["_parameters"] or name in own["_buffers"]:
        return None
    if name in own:  # weight_norm and the like put a plain attribute in the parameter's place
        return own[name]
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _write(name: str, self: nn.Module, value: Any) -> None:
    self.__dict__[name] = value


def _delete(name: str, self: nn.Module) -> None:
    if name not in self.__dict__:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    del self.__dict__[name]


def _assigned(self: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """What to register when ``module.name = value`` assigns to a leaf that is a buffer; parameters are torch's
    matter.
    """
    view = self._dp_views[name]
    if view.kind != "buffer" or name not in self._buffers:
        return value
    if isinstance(value, DTensor):
        return view.layout.localize(value) if value.shape == view.layout.shape else value
    raise TypeError(
        f"buffer {view.name!r} is laid out as {view.layout}; assign a DTensor to it, or write into it in place "
        f"(found a plain tensor of shape {tuple(value.shape)})"
    )
