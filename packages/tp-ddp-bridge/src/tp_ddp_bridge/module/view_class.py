"""The class of a bridged module.

A subclass of the module's own class, made once for each class and set of names, with one property per leaf. It keeps
the name of the class: the module prints as before. At the module's edges everything is global again: state
dicts, pickles, assignment.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge.layout import Layout, bridge_tag, is_local_shard, tag_leaf, tag_replicated
from tp_ddp_bridge.module.eager import eager_view
from tp_ddp_bridge.module.loading import ShardingStateDict, run_pre_hooks_first
from tp_ddp_bridge.module.view import ForwardScope, View, in_forward, leaf_of

_scope = ForwardScope()
_classes: weakref.WeakValueDictionary[tuple[type, tuple[str, ...]], type] = weakref.WeakValueDictionary()


class LeafTable(dict[str, Any]):
    """``_parameters`` of a module below a bridged root: refuses replacements of leaves.

    Handles of sharding packages write full parameters here, past ``nn.Module`` and with the attributes of the
    present ones; ``weight_norm`` and its kin delete a parameter and register others.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        present = self.get(name)
        if isinstance(present, nn.Parameter) and isinstance(value, nn.Parameter) and value is not present:
            is_copy = bridge_tag(value) is not None and bridge_tag(value) is bridge_tag(present)
            if is_copy or (value.shape != present.shape and is_local_shard(present) and bridge_tag(present) is None):
                reason = "the call gives the module its full parameter, but the module is bridged to data parallelism"
                hint = "undo in the reverse order: undo_dp_transform(module), then the undo() of what sharded it"
                raise PlanError(Problem("parameter-replaced", name, found=reason, hint=hint))
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if isinstance(self[name], nn.Parameter) and hasattr(self[name], "_dp_leaf"):
            raise RuntimeError(
                f"parameter {name!r} is a local leaf of the data-parallel bridge, and weight_norm and its kin cannot "
                "replace it: call them before bridging, or undo_dp_transform(module) first"
            )
        super().__delitem__(name)


class BridgedModule:
    """Mixin of every class from ``view_class``.

    Instances hold ``_dp_views``: attribute name -> View; roots hold ``_dp_replicated_on`` as well. No ``__slots__``:
    ``__class__`` can only be assigned between classes whose instances have the same memory layout.
    """

    _dp_names: ClassVar[tuple[str, ...]] = ()
    _dp_views: dict[str, View]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the outermost call reads each leaf once."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__
        with _scope:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._dp_views and isinstance(value, torch.Tensor):
            value = _buffer_value(self, name, value)
        super().__setattr__(name, value)
        if name in self._dp_views:
            tag_leaves(as_module(self))  # the assignment may have registered another leaf

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Apply ``.to()`` and its kin to the leaves; replacements of leaves get their tags."""
        super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module._apply
        tag_all(as_module(self))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write DTensors of global shape in place of leaves; communicates nothing."""
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
        with run_pre_hooks_first(module, state_dict, *rest):
            sharding = ShardingStateDict(module, self._dp_views, state_dict, prefix, local_metadata, error_msgs)
            super()._load_from_state_dict(sharding, *rest)  # type: ignore[misc]  # nn.Module's
        sharding.finish()
        tag_leaves(module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module.__setstate__
        tag_all(as_module(self))

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
        return rebuild, (original_class(as_module(self)), own._dp_names, *args[1:]), *rest


def as_module(instance: BridgedModule) -> nn.Module:
    """Return the instance as a module; the type system cannot see it."""
    return cast(nn.Module, instance)


def rebuild(base: type[nn.Module], names: tuple[str, ...], *args: Any) -> nn.Module:
    """Return an empty instance of ``base``'s view class, for pickle and copy to fill."""
    kind = view_class(base, names)
    instance: nn.Module = kind.__new__(kind, *args)
    instance.__dict__["_dp_views"] = {}  # for `__setattr__`
    return instance


def view_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of ``base`` that reads ``names`` as DTensors; the same class every time."""
    cached = _classes.get((base, names))
    if cached is not None:
        return cached

    def body(namespace: dict[str, Any]) -> None:
        for name in names:
            namespace[name] = property(functools.partial(_read, name))
        namespace["__module__"] = base.__module__
        namespace["__qualname__"] = base.__qualname__
        namespace["__doc__"] = base.__doc__
        namespace["_dp_names"] = names

    created = types.new_class(base.__name__, (BridgedModule, base), {}, body)
    _classes[(base, names)] = created
    return created


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the former class of a bridged module."""
    return cast("type[nn.Module]", type(module).__mro__[2])  # view class, BridgedModule, the module's own


def restore_class(module: nn.Module) -> None:
    """Undo ``set_views`` of one module, and its role as a root."""
    if isinstance(module._parameters, LeafTable):
        module.__dict__["_parameters"] = dict(module._parameters)
    if isinstance(module, BridgedModule):
        module.__class__ = original_class(module)  # type: ignore[assignment]  # a class of another module
        del module.__dict__["_dp_views"]
        if module.__dict__.pop("_dp_replicated_on", None) is not None:
            hooks = module._load_state_dict_post_hooks
            for key in [key for key, hook in hooks.items() if hook is tag_all]:
                del hooks[key]


def set_views(module: nn.Module, views: dict[str, View]) -> None:
    """Make ``module`` read its leaves as ``views``, besides earlier ones."""
    module.__dict__.setdefault("_dp_views", {}).update(views)
    base = original_class(module) if isinstance(module, BridgedModule) else type(module)
    module.__class__ = view_class(base, tuple(module.__dict__["_dp_views"]))
    tag_leaves(module)


def tag_leaves(module: nn.Module) -> None:
    """Tag every leaf of one module with its layout."""
    views: dict[str, View] = module.__dict__.get("_dp_views", {})
    for name, view in views.items():
        leaf = leaf_of(module, name)
        if leaf is not None and not isinstance(leaf, DTensor) and leaf.shape == view.local_shape:
            tag_leaf(leaf, view.layout)


def tag_all(module: nn.Module, incompatible_keys: Any = None) -> None:
    """Set the tags of one module, and of plain parameters below a root, again. A load-state-dict hook."""
    tag_leaves(module)
    on: Layout | None = module.__dict__.get("_dp_replicated_on")
    if on is not None:
        tag_replicated(module.parameters(), on)


def _read(name: str, self: nn.Module) -> Any:
    value = leaf_of(self, name)
    if value is None:
        if name in self._parameters or name in self._buffers:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    view: View = self.__dict__["_dp_views"][name]
    if torch.compiler.is_compiling():
        return view.read(value)
    try:
        return view.read(value) if in_forward() else eager_view(view.read(value), value, view.layout)
    except AttributeError as error:
        # nn.Module.__getattr__ would answer an AttributeError with the plain local leaf: a silently wrong shape.
        raise RuntimeError(f"{view.kind} {view.name!r} could not be read as a DTensor: {error}") from error


def _buffer_value(self: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the value to register for ``module.name = value`` on a buffer; torch checks parameters."""
    view: View = self._dp_views[name]
    if view.kind != "buffer" or name not in self._buffers:
        return value
    if isinstance(value, DTensor):
        return view.layout.localize(value) if value.shape == view.layout.shape else value
    raise TypeError(
        f"buffer {view.name!r} is laid out as {view.layout}; assign a DTensor to it, or write into it in place "
        f"(found a plain tensor of shape {tuple(value.shape)})"
    )
