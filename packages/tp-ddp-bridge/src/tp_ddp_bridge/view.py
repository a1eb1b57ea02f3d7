"""Reading a leaf as a DTensor.

A view lives as long as the expression that read it. Nothing is swapped in and nothing has to be restored, so there is
nothing that an exception, a recomputation in backward or a call of a submodule could find in the wrong state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._torch_compat import DTensorSpec, holders, local_of, make_spec, same_memory, tensor_hooks, wrap
from tp_ddp_bridge.cache import cached_view
from tp_ddp_bridge.layout import Layout


class AsDTensor(torch.autograd.Function):
    """``leaf -> DTensor``; backward gives the reducer a plain tensor that has arrived.

    The public ``DTensor.from_local`` computes the same in twice the time; it is used under ``torch.compile``.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, spec: DTensorSpec) -> DTensor:
        """Wrap an alias of ``leaf`` that shares its memory."""
        ctx.of = (spec, leaf, leaf._version)
        ctx.set_materialize_grads(False)
        return wrap(leaf.view_as(leaf), spec, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None]:
        """Bring the gradient to the leaf's placements (communicates only if it lies otherwise) and unwrap it."""
        (grad,) = grads
        if grad is None:
            return None, None
        spec, leaf, version = ctx.of
        if leaf._version != version:
            # A view has a version counter of its own, so autograd cannot see that what it saved was overwritten.
            raise RuntimeError(
                f"a parameter of local shape {tuple(leaf.shape)} was changed in place between forward and backward "
                "(by an "
                f"optimizer step, or by loading), version {version} -> {leaf._version}: its gradient would be wrong. "
                "Run backward before the step"
            )
        if grad.placements != spec.placements:
            grad = grad.redistribute(spec.mesh, spec.placements)
        if torch.is_grad_enabled():  # create_graph=True: a second derivative goes through to_local
            return grad.to_local(), None
        return local_of(grad), None


_OURS = 2  # references to a view that only `View.spare` holds: its variable and the argument of getrefcount
_NODE: Any = AsDTensor._backward_cls


class View:
    """The recipe for one attribute: which layout its leaf has.

    Attributes:
        layout: Mesh, placements, global shape and stride.
        kind: ``"parameter"`` or ``"buffer"``.
        name: FQN in the module that was transformed, for messages.
        local_shape: Shape of the leaf on this rank.
    """

    __slots__ = ("_spares", "_specs", "kind", "layout", "local_shape", "name")

    def __init__(self, layout: Layout, kind: str, name: str, local_shape: torch.Size) -> None:
        self.layout = layout
        self.kind = kind
        self.name = name
        self.local_shape = local_shape
        self._specs: dict[tuple[torch.dtype, torch.device], DTensorSpec] = {}
        self._spares: list[DTensor] = []

    def read(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """What the attribute gives when ``value`` stands in the module.

        Args:
            value: The leaf, or what ``functional_call`` put in its place: a DTensor (given back as it is) or a plain
                tensor of the leaf's local shape (seen in the leaf's layout).

        Raises:
            RuntimeError: ``value`` has another shape, or lies on another device type than the mesh.
        """
        if value is None or isinstance(value, DTensor):
            return value
        layout = self.layout
        if torch.compiler.is_compiling():
            return DTensor.from_local(
                value, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
            )
        if value.shape != self.local_shape:
            raise RuntimeError(
                f"{self.kind} {self.name!r}: a plain tensor of shape {tuple(value.shape)} stands for a local part of "
                f"shape {tuple(self.local_shape)} (global {layout}); pass the local part, or a DTensor"
            )
        view: torch.Tensor = cached_view(self, value)
        return view

    def make(self, leaf: torch.Tensor) -> DTensor:
        """A new view of ``leaf`` in the grad mode of this moment."""
        spec = self._specs.get((leaf.dtype, leaf.device))
        if spec is None:
            spec = self._spec_for(leaf)
        if leaf.requires_grad and torch.is_grad_enabled():
            view: DTensor = AsDTensor.apply(leaf, spec)  # type: ignore[no-untyped-call]  # torch's stub
        else:
            view = wrap(leaf.detach(), spec, requires_grad=False)
        if self.kind == "parameter":
            view._is_param = True  # isinstance(view, nn.Parameter), as before the bridge; registering one anew raises
        return view

    def lay_by(self, view: DTensor, leaf: torch.Tensor) -> None:
        """Keep ``view``, which a forward has let go, for the next one."""
        if not self._spares and view.requires_grad and type(leaf) is nn.Parameter:
            self._spares.append(view)

    def spare(self, leaf: torch.Tensor) -> DTensor | None:
        """A view of an earlier forward that is as good as a new one: nobody holds it, and nothing was done to it.

        Making one costs a Python autograd function, 20 us; taking one up again 2 us. A graph that saved it, a variable
        that the user kept, a hook, a write in place or other memory under the leaf: each makes a new one.
        """
        try:
            view = self._spares.pop()  # whichever thread gets it
        except IndexError:
            return None
        node: Any = view.grad_fn
        if (
            sys.getrefcount(view) > _OURS
            or holders(view) > 1
            or view._version != 0
            or tensor_hooks(view)
            or type(node) is not _NODE
            or not leaf.requires_grad
            or view.dtype != leaf.dtype
            or not same_memory(leaf, view._local_tensor)
        ):
            return None
        spec, of, _ = node.of
        if of is not leaf:
            return None
        node.of = (spec, leaf, leaf._version)  # what backward compares
        return view

    def forget(self) -> None:
        """Drop the spare, which would keep the leaf's old memory alive."""
        self._spares.clear()

    def _spec_for(self, leaf: torch.Tensor) -> DTensorSpec:
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

    def __getstate__(self) -> tuple[Layout, str, str, torch.Size]:
        return (self.layout, self.kind, self.name, self.local_shape)

    def __setstate__(self, state: tuple[Layout, str, str, torch.Size]) -> None:
        self.layout, self.kind, self.name, self.local_shape = state
        self._specs = {}
        self._spares = []
