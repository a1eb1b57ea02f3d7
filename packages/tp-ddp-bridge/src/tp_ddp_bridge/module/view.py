"""Reading a leaf as a DTensor.

A view lives as long as the expression that read it. Nothing is swapped in and nothing has to be restored, so no
exception, recomputation in backward or direct call of a submodule can find the module in the wrong state.

Within one outermost forward a repeated read of a leaf gives the same view, unless one of these has
changed: the leaf's version or dtype, grad mode, inference mode, or the checkpointed region.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._shared.dtensor import as_dtensor
from tp_ddp_bridge._torch_compat import DTensorSpec, local_of, make_spec, top_saved_tensors_hooks, wrap
from tp_ddp_bridge.layout import Layout


class AsDTensor(torch.autograd.Function):
    """``leaf -> DTensor``; backward gives DDP's reducer a plain tensor, already waited for.

    The public ``DTensor.from_local`` computes the same in twice the time; it is used under ``torch.compile``.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, spec: DTensorSpec) -> DTensor:
        """Wrap an alias of ``leaf``, in the same memory."""
        ctx.of = (spec, leaf, leaf._version)
        ctx.set_materialize_grads(False)  # None for an unused view
        return wrap(leaf.view_as(leaf), spec, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None]:
        """Bring the gradient to the leaf's placements and unwrap it; communicates only if they differ."""
        (grad,) = grads
        if grad is None:
            return None, None
        spec, leaf, version = ctx.of
        if leaf._version != version:
            # A view has its own version counter, so autograd cannot see that its saved values were overwritten.
            raise RuntimeError(
                f"a parameter of local shape {tuple(leaf.shape)} was changed in place between forward and backward "
                f"(by an optimizer step, or by loading), version {version} -> {leaf._version}: its gradient would be "
                "wrong. Run backward before the step"
            )
        if grad.placements != spec.placements:
            grad = grad.redistribute(spec.mesh, spec.placements)
        if torch.is_grad_enabled():  # create_graph=True: a second derivative goes through to_local
            return grad.to_local(), None
        return local_of(grad), None  # waited: the reducer copies it at once


class View:
    """Recipe for the view of one attribute.

    Attributes:
        layout: Mesh, placements, global shape and stride.
        kind: ``"parameter"`` or ``"buffer"``.
        name: FQN in the transformed module, for messages.
        local_shape: Shape of the leaf on this rank.
    """

    __slots__ = ("_specs", "kind", "layout", "local_shape", "name")

    def __init__(self, layout: Layout, kind: str, name: str, local_shape: torch.Size) -> None:
        self.layout = layout
        self.kind = kind
        self.name = name
        self.local_shape = local_shape
        self._specs: dict[tuple[torch.dtype, torch.device], DTensorSpec] = {}

    def read(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the attribute for the module's present ``value``.

        Args:
            value: The leaf, or a replacement by ``functional_call``: a DTensor (returned as it is) or a plain tensor of
                the leaf's local shape (read in the leaf's layout).

        Raises:
            RuntimeError: ``value`` has another shape, or another device type than the mesh.
        """
        if value is None or isinstance(value, DTensor):
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
            view: DTensor = AsDTensor.apply(leaf, spec)  # type: ignore[no-untyped-call]  # torch's stub
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


def leaf_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return what stands in a module under the name of a parameter or buffer."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


class _Forward(threading.local):
    """State of this thread's forward; a recomputation in backward starts its own."""

    depth = 0
    views: dict[Any, tuple[DTensor, torch.Tensor]] | None = None


_forward = _Forward()


class ForwardScope:
    """Keeps views until the outermost of nested scopes ends."""

    __slots__ = ()

    def __enter__(self) -> None:
        if _forward.depth == 0:
            _forward.views = {}
        _forward.depth += 1

    def __exit__(self, *_: object) -> None:
        _forward.depth -= 1
        if _forward.depth == 0:
            _forward.views = None


def in_forward() -> bool:
    """Return True if a bridged module is running in this thread."""
    return _forward.depth > 0
