"""Bridged modules: each leaf is registered as a plain local parameter, and read as a DTensor.

A module's class becomes a subclass with one property per leaf. Reading the attribute gives a *view*, a DTensor that
lives as long as the expression that read it. Nothing is swapped in and nothing has to be restored, so no exception,
recomputation in backward or direct call of a submodule can find the module in the wrong state. At the module's edges
everything is global: state dicts, pickles, assignment.

Within one outermost forward a repeated read of a leaf gives the same view, unless one of these has
changed: the leaf's version or dtype, grad mode, inference mode, or the checkpointed region.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._shared._torch_compat import without_overrides
from tp_ddp_bridge._shared.dtensor import as_dtensor
from tp_ddp_bridge._shared.norms import BRIDGED
from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge._torch_compat import (
    GRAD_HOOKS,
    POST_ACCUMULATE_HOOKS,
    DTensorSpec,
    Function,
    is_transformed,
    local_of,
    make_spec,
    top_saved_tensors_hooks,
    wrap,
)
from tp_ddp_bridge.layout import TORCH_GRAD, Layout, as_plain, bridge_tag, is_local_shard, tag_leaf, tag_replicated
from tp_ddp_bridge.module.loading import ShardingStateDict, leaf_of, run_pre_hooks_first

# ---- reading a leaf ------------------------------------------------------------------------------------------------


class AsDTensor(Function):
    """``leaf -> DTensor``; backward gives DDP's reducer a plain tensor, already waited for.

    The public ``DTensor.from_local`` computes the same in twice the time; it is used under ``torch.compile``.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, spec: DTensorSpec) -> DTensor:
        """Wrap an alias of ``leaf``, in the same memory."""
        ctx.of = (spec, leaf, leaf._version)  # attributes of a leaf are slow outside of `without_overrides`
        ctx.set_materialize_grads(False)  # None for an unused view
        return wrap(leaf.detach(), spec, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None]:
        """Bring the gradient to the leaf's placements and unwrap it; communicates only if they differ."""
        (grad,) = grads
        if grad is None:
            return None, None
        spec, leaf, version = ctx.of
        with without_overrides():
            present = leaf._version
        if present != version:
            # A view has its own version counter, so autograd cannot see that its saved values were overwritten.
            raise RuntimeError(
                f"a parameter of local shape {tuple(leaf.shape)} was changed in place between forward and backward "
                f"(by an optimizer step, or by loading), version {version} -> {present}: its gradient would be "
                "wrong. Run backward before the step"
            )
        if grad.placements != spec.placements:
            grad = grad.redistribute(spec.mesh, spec.placements)
        if torch.is_grad_enabled():  # create_graph=True: a second derivative goes through to_local
            return grad.to_local(), None
        return local_of(grad), None  # waited: the reducer copies it at once


@dataclass(eq=False, slots=True)
class View:
    """Recipe for the view of one attribute.

    Attributes:
        layout: Mesh, placements, global shape and stride.
        kind: ``"parameter"`` or ``"buffer"``.
        name: FQN in the transformed module, for messages.
        local_shape: Shape of the leaf on this rank.
    """

    layout: Layout
    kind: str
    name: str
    local_shape: torch.Size
    _specs: dict[tuple[torch.dtype, torch.device], DTensorSpec] = field(default_factory=dict)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Return the attribute for the module's present ``value``.

        Args:
            value: The leaf, or a replacement by ``functional_call``: a DTensor (returned as it is) or a plain tensor of
                the leaf's local shape (read in the leaf's layout).

        Raises:
            RuntimeError: ``value`` has another shape, or another device type than the mesh.
        """
        if isinstance(value, DTensor):
            return value  # a DTensor of `functional_call`
        layout = self.layout
        if torch.compiler.is_compiling():
            return as_dtensor(value, layout.mesh, layout.placements, layout.shape, layout.stride)
        if value.shape != self.local_shape:
            raise RuntimeError(
                f"{self.kind} {self.name!r}: a plain tensor of shape {tuple(value.shape)} is no local shard of "
                f"shape {tuple(self.local_shape)} (global {layout}); pass the local shard, or a DTensor"
            )
        views = _forward.views
        if views is None or value.is_inference():
            return self.make(value)
        key = (
            id(value),
            id(layout),  # that of all names of a tie
            value._version,
            value.dtype,
            value.requires_grad,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            top_saved_tensors_hooks(),  # a checkpointed region has its own
        )
        entry = views.get(key)
        if entry is None:
            # Kept with its leaf: while the entry lives no other tensor can get the leaf's id.
            entry = views[key] = (self.make(value), value)
        return entry[0]

    def make(self, leaf: torch.Tensor) -> DTensor:
        """Return a new view of ``leaf`` in the current grad mode."""
        spec = self._specs.get((leaf.dtype, leaf.device)) or self._spec_for(leaf)
        if leaf.requires_grad and torch.is_grad_enabled():
            if is_transformed():
                raise RuntimeError(f"{self.kind} {self.name!r}: torch.func's transforms take no DTensors; use autograd")
            view: DTensor = AsDTensor.apply(leaf, spec)  # type: ignore[attr-defined]  # torch's stub
        else:
            view = wrap(leaf.detach(), spec, requires_grad=False)
        if self.kind == "parameter":
            view._is_param = True  # isinstance(view, nn.Parameter), as before the bridge; registering one anew raises
        return view

    def _spec_for(self, leaf: torch.Tensor) -> DTensorSpec:
        # dtype and device are the leaf's, as `.to()` may have changed it, never the original DTensor's.
        layout = self.layout
        if leaf.device.type not in (layout.mesh.device_type, "meta"):
            raise RuntimeError(
                f"{self.kind} {self.name!r} lies on {leaf.device.type!r}, but its mesh is made for "
                f"{layout.mesh.device_type!r}: move it back, or undo_dp_transform and parallelize on a mesh of that "
                "device type"
            )
        spec = make_spec(layout.mesh, layout.placements, layout.shape, layout.stride, leaf.dtype)
        self._specs[leaf.dtype, leaf.device] = spec
        return spec

    def __reduce__(self) -> tuple[Any, ...]:  # the specs are built again
        return View, (self.layout, self.kind, self.name, self.local_shape)


class _Forward(threading.local):
    """Views of this thread's outermost forward, `None` outside of one; a recomputation in backward starts its own."""

    views: dict[Any, tuple[DTensor, torch.Tensor]] | None = None


_forward = _Forward()

# ---- reading a leaf outside a forward: users write to parameters, and assign to them -------------------------------

_DATA: Any = torch.Tensor.data


class EagerView(DTensor):
    """A view outside a forward; ``_of`` holds its leaf and its layout.

    Assignments to it go to the leaf: on the view they would vanish with it. Hooks are refused.
    """

    __slots__ = ()
    _of: tuple[torch.Tensor, Layout]

    def _set_data(self, value: DTensor) -> None:
        leaf, layout = self._of
        leaf.data = layout.localize(value)

    def _set_grad(self, value: DTensor | None) -> None:
        leaf, layout = self._of
        leaf.grad = None if value is None else layout.localize(value)
        TORCH_GRAD.__set__(self, value)

    data = property(_DATA.__get__, _set_data)
    grad = property(TORCH_GRAD.__get__, _set_grad)  # from when the view was read

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: the hook would vanish with the view."""
        raise RuntimeError(
            "each read of the attribute is a new tensor, and a hook on it would vanish: register it on the leaf, "
            "dict(module.named_parameters())[name], whose gradient is this rank's shard, or before bridging"
        )

    register_post_accumulate_grad_hook = register_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain DTensor: loading it needs no bridge."""
        return self._of[1].wrap(self._local_tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._of[1].wrap(self._local_tensor).__deepcopy__(memo)


def _read(name: str, self: nn.Module) -> Any:
    """Return the attribute ``name`` of a bridged module, as the module's property."""
    value = leaf_of(self, name)
    if value is None:
        if name in self._parameters or name in self._buffers:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    view: View = self.__dict__[BRIDGED].views[name]
    try:
        with without_overrides():  # of the leaf's class
            if torch.compiler.is_compiling():
                return view.read(value)
            dtensor: Any = view.read(value)
    except AttributeError as error:
        # nn.Module.__getattr__ would answer an AttributeError with the plain local leaf: a silently wrong shape.
        raise RuntimeError(f"{view.kind} {view.name!r} could not be read as a DTensor: {error}") from error
    if _forward.views is None and dtensor is not value and isinstance(value, nn.Parameter):
        if value.grad is not None and value.grad.dtype == value.dtype and value.grad.layout == torch.strided:
            TORCH_GRAD.__set__(dtensor, view.layout.wrap(value.grad))
        dtensor.__class__ = EagerView
        dtensor._of = (value, view.layout)
    return dtensor


# ---- the class of a bridged module ---------------------------------------------------------------------------------

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
                raise PlanError(
                    Problem(
                        "parameter-replaced",
                        name,
                        found="the call gives the module its full parameter, but the module is bridged to data"
                        " parallelism",
                        hint="undo in the reverse order: undo_dp_transform(module), then the undo() of what sharded it",
                    )
                )
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if isinstance(self[name], nn.Parameter) and type(bridge_tag(self[name])) is Layout:
            raise RuntimeError(
                f"parameter {name!r} is a local leaf of the data-parallel bridge, and weight_norm and its kin cannot "
                "replace it: call them before bridging, or undo_dp_transform(module) first"
            )
        super().__delitem__(name)


@dataclass(eq=False)
class Bridge:
    """``_bridge`` of a module with leaves, and of a root.

    Attributes:
        views: Attribute name -> View, of the module's own leaves.
        replicated_on: Of a root, the layout of plain parameters below it without their shape.
    """

    views: dict[str, View] = field(default_factory=dict)
    replicated_on: Layout | None = None


def views_of(module: nn.Module) -> dict[str, View]:
    """Return the views of a module by attribute name; none of a module that is not bridged."""
    bridge: Bridge | None = module.__dict__.get(BRIDGED)
    return {} if bridge is None else bridge.views


class BridgedModule:
    """Mixin of every class from ``view_class``.

    Instances hold ``_bridge``, a ``Bridge``. No ``__slots__``: ``__class__`` can only be assigned between classes whose
    instances have the same memory layout.
    """

    _bridge: Bridge

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the outermost call reads each leaf once."""
        if torch.compiler.is_compiling() or _forward.views is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__
        _forward.views = {}
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module.__call__
        finally:
            _forward.views = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign as torch does; a buffer takes this rank's shard of a DTensor."""
        view = self._bridge.views.get(name)
        if view is not None and isinstance(value, torch.Tensor) and name in vars(self)["_buffers"]:
            if not isinstance(value, DTensor):
                raise TypeError(
                    f"buffer {view.name!r} is laid out as {view.layout}; assign a DTensor to it, or write into it in "
                    f"place (found a plain tensor of shape {tuple(value.shape)})"
                )
            value = view.layout.localize(value) if value.shape == view.layout.shape else value
        super().__setattr__(name, value)
        if view is not None:
            tag_all(cast(nn.Module, self))  # the assignment may have registered another leaf

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Apply ``.to()`` and its kin to the leaves; replacements of leaves get their tags."""
        as_plain(self._parameters.values())  # type: ignore[attr-defined]  # of the module
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module._apply
        finally:
            tag_all(cast(nn.Module, self))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write DTensors of global shape in place of leaves; communicates nothing."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]  # nn.Module's
        for name, view in self._bridge.views.items():
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
        if not self._bridge.views:
            super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]  # nn.Module's
            return
        module = cast(nn.Module, self)
        with run_pre_hooks_first(module, state_dict, *rest):
            layouts = {name: view.layout for name, view in self._bridge.views.items()}
            sharding = ShardingStateDict(module, layouts, state_dict, prefix, local_metadata, error_msgs)
            super()._load_from_state_dict(sharding, *rest)  # type: ignore[misc]  # nn.Module's
        sharding.finish()
        tag_all(module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module.__setstate__
        tag_all(cast(nn.Module, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the module's own class plus the names of its views."""
        make, args, *rest = cast(Any, super().__reduce_ex__(protocol))
        own = type(self)
        if not args or args[0] is not own or make.__name__ != "__newobj__":
            raise TypeError(
                f"{own.__name__} pickles itself with __reduce__, which would lose the bridge's views: "
                "undo_dp_transform(module) before pickling or copying it"
            )
        return rebuild, (original_class(cast(nn.Module, self)), tuple(self._bridge.views), *args[1:]), *rest


def rebuild(base: type[nn.Module], names: tuple[str, ...], *args: Any) -> nn.Module:
    """Return an empty instance of ``base``'s view class, for pickle and copy to fill."""
    kind = view_class(base, names)
    instance: nn.Module = kind.__new__(kind, *args)
    instance.__dict__[BRIDGED] = Bridge()  # for `__setattr__`
    return instance


def view_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of ``base`` that reads ``names`` as DTensors; the same class every time.

    It keeps the name of ``base``: the module prints as before.
    """
    cached = _classes.get((base, names))
    if cached is not None:
        return cached
    body: dict[str, Any] = {name: property(functools.partial(_read, name)) for name in names}
    body |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    created = types.new_class(base.__name__, (BridgedModule, base), {}, lambda namespace: namespace.update(body))
    _classes[(base, names)] = created
    return created


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the former class of a bridged module."""
    return cast("type[nn.Module]", type(module).__mro__[2])  # view class, BridgedModule, the module's own


def set_views(module: nn.Module, views: dict[str, View]) -> None:
    """Make ``module`` read its leaves as ``views``, besides earlier ones."""
    module.__dict__.setdefault(BRIDGED, Bridge()).views.update(views)
    base = original_class(module) if isinstance(module, BridgedModule) else type(module)
    module.__class__ = view_class(base, tuple(views_of(module)))
    tag_all(module)


def restore_class(module: nn.Module) -> None:
    """Undo ``set_views`` of one module, and its role as a root."""
    if isinstance(module._parameters, LeafTable):
        module.__dict__["_parameters"] = dict(module._parameters)
    if isinstance(module, BridgedModule):
        module.__class__ = original_class(module)  # type: ignore[assignment]  # a class of another module
        if module.__dict__.pop(BRIDGED).replicated_on is not None:
            hooks = module._load_state_dict_post_hooks
            for key in [key for key, hook in hooks.items() if hook is tag_all]:
                del hooks[key]


def tag_all(module: nn.Module, incompatible_keys: Any = None) -> None:
    """Tag the leaves of one module, and below a root all plain parameters, again. A load-state-dict hook."""
    for name, view in views_of(module).items():
        leaf = leaf_of(module, name)
        if leaf is not None and not isinstance(leaf, DTensor) and leaf.shape == view.local_shape:
            tag_leaf(leaf, view.layout)
    bridge: Bridge | None = module.__dict__.get(BRIDGED)
    if bridge is not None and bridge.replicated_on is not None:
        tag_replicated(module.parameters(), bridge.replicated_on)


# ---- gradient hooks of users ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class GradHooks:
    """Hook of a leaf that runs all ``register_hook`` hooks of its DTensor parameter, still on DTensors.

    They stay in torch's own dict for them, so a user's handle removes its hook before the bridge, under it and after
    it.
    """

    hooks: dict[int, Callable[..., Any]]
    layout: Layout

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Pass the local gradient to each hook as a DTensor and take its result back."""
        for hook in list(self.hooks.values()):  # a hook may remove itself
            result = hook(self.layout.wrap(grad))
            grad = grad if result is None else self.layout.localize(result)
        return grad


def hook_problems(name: str, tensor: torch.Tensor) -> Iterator[Problem]:
    """Yield a problem for hooks that cannot move between a DTensor and its leaf."""
    on_grad = (getattr(tensor, GRAD_HOOKS) or {}).values()
    is_leaf = not isinstance(tensor, DTensor)
    if getattr(tensor, POST_ACCUMULATE_HOOKS) or (is_leaf and not all(isinstance(each, GradHooks) for each in on_grad)):
        yield Problem(
            "parameter-hooks",
            name,
            found=f"a hook registered on the {'local leaf' if is_leaf else 'DTensor'} cannot be carried over",
            hint="remove it, and register it afterwards on the new parameter of named_parameters()",
        )


def refuse_gradients(parameter: torch.Tensor, name: str) -> None:
    """Raise on a gradient of a replaced ``parameter``: the module computes with an old reference."""
    problem = Problem(
        "parameter-replaced",
        name,
        found="a gradient arrived at the DTensor that a local leaf has replaced: the module kept a reference to it",
        hint="read the parameter as an attribute in forward",
    )

    def refuse(_: torch.Tensor) -> None:
        raise PlanError(problem)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(refuse)
