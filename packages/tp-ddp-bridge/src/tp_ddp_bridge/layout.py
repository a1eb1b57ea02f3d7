"""Sharding of one tensor, and its tags on parameters.

Vocabulary of this package:

- *leaf*: the plain local ``nn.Parameter`` (or buffer) registered in the module. DDP and optimizers see
  leaves.
- *view*: the DTensor from reading the attribute. It is created on each read and never stored in the module.
- *tie*: one leaf registered under several names.
- *sections*: a fused or kv-copied weight beyond placements (see ``_shared/sharding_info.py``). tp-styles
  makes them; the bridge leaves such parameters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_ddp_bridge._shared._torch_compat import without_overrides
from tp_ddp_bridge._shared.norms import BRIDGED
from tp_ddp_bridge._shared.shard_values import Refusing, ShardValue, Ways
from tp_ddp_bridge._shared.sharding_info import ATTRIBUTE, ShardingInfo, sharding_info_of
from tp_ddp_bridge._torch_compat import local_of, make_spec, wrap


class Layout(ShardingInfo):
    """Mesh, placements, global shape and stride of a tensor, for one rank's shard.

    ``sections`` is empty if placements alone describe the shard.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> Layout:
        """Return the layout of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes; ``axis0``, ``axis1``, ... if the mesh has none."""
        return tuple(self.mesh.mesh_dim_names or (f"axis{index}" for index in range(self.mesh.ndim)))

    @property
    def is_replicated(self) -> bool:
        """True if every rank of the mesh holds the full tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def sharded_axes(self) -> tuple[int, ...]:
        """Return the mesh axes with different shards along them, without axes of one rank."""
        # Not `is_shard()`: a shard that FSDP2 strides is no Shard.
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(axis) > 1
        )

    def section_views(self, local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return each section's first global row and this rank's rows: views of ``local``, possibly empty."""
        axis, dim = self.section_axis()
        offset, views = 0, []
        for start, stop in self.ranges(self.mesh.get_local_rank(axis)):
            views.append((start, local.narrow(dim, offset, stop - start)))
            offset += stop - start
        return views

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return ``local`` as a DTensor: same memory, no autograd, no communication. Not for sections."""
        assert not self.sections, "placements would misdescribe it"
        local = local.detach()
        spec = make_spec(self.mesh, self.placements, self.shape, self.stride, local.dtype)
        return wrap(local, spec, requires_grad=False)

    def localize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``tensor`` in this layout.

        Communicates only if ``tensor`` has another layout: a redistribution on the same mesh, a gather on another.

        Raises:
            TypeError: ``tensor`` is not a DTensor of the global shape.
        """
        if not isinstance(tensor, DTensor) or tensor.shape != self.shape:
            reason = f"{type(tensor).__name__} of shape {tuple(getattr(tensor, 'shape', ()))}"
            raise TypeError(f"a parameter is laid out as {self}: assign a DTensor of that global shape, not a {reason}")
        with torch.no_grad():
            if tensor.device_mesh != self.mesh or self.sections:
                return self.shard(tensor.full_tensor())  # another mesh: a gather
            if tuple(tensor.placements) != self.placements:
                tensor = tensor.redistribute(self.mesh, self.placements)
            return local_of(tensor).detach()

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor held by every rank; no communication."""
        full = full.detach()
        if self.is_replicated:
            return full
        if self.sections:
            axis, dim = self.section_axis()
            rows = [
                full.narrow(dim, start, stop - start) for start, stop in self.ranges(self.mesh.get_local_rank(axis))
            ]
            return torch.cat(rows, dim)
        return local_of(distribute_tensor(full, self.mesh, self.placements, src_data_rank=None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self  # a value; and a copied DeviceMesh would equal no other

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, tuple(self)

    def __str__(self) -> str:
        places = ", ".join(f"{axis}={placement}" for axis, placement in zip(self.axes, self.placements, strict=True))
        sections = f" in sections {[tuple(section) for section in self.sections]}" if self.sections else ""
        return f"{tuple(self.shape)} on {places}{sections}"


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor, or of a tensor with ``_sharding_info``. ``None`` if it is unknown."""
    if isinstance(tensor, DTensor):
        return Layout.of(tensor)
    tagged = bridge_tag(tensor)
    if tagged is not None:
        return tagged
    info = sharding_info_of(tensor)
    return None if info is None else Layout(*info[:4], info.sections if info.needs_sections else ())


def is_local_shard(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor that holds less than the full one."""
    layout = None if isinstance(tensor, DTensor) else layout_of(tensor)
    return layout is not None and bool(layout.sharded_axes())


def tensor_groups(parameters: Iterable[torch.Tensor], sharded: bool = False) -> list[dist.ProcessGroup]:
    """Return every group of several ranks along an axis of a parameter's mesh.

    Args:
        parameters: Replicated plain ones do not count.
        sharded: Only axes with different shards along them.

    Returns:
        Groups in the order of parameters and axes, the same on all ranks; an order by rank numbers is not.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for parameter in parameters:
        layout = None if is_replicated_tag(parameter) else layout_of(parameter)
        if layout is not None:
            for axis in layout.sharded_axes() if sharded else range(layout.mesh.ndim):
                group = layout.mesh.get_group(axis)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in groups.items() if len(ranks) > 1]


# ---- tags. Torch drops attributes and classes of parameters when it copies or replaces them, so modules set them again
# ---- after every such call.


class ReplicatedLayout(Layout):
    """Layout of a parameter that was no DTensor; tensor-parallel ranks hold equal copies of it."""

    __slots__ = ()


_WAYS = Ways(
    read="{name} of module.weight, or of module.state_dict(keep_vars=True)['weight'], is of the full parameter: a "
    "DTensor with its gradient; of gradients tp_ddp_bridge.clip_grad_norm_ and grad_norm are the full norm; "
    "parameter.detach() and parameter.grad.detach() are the shard alone",
    initialise="initialise before the module is sharded, or by load_state_dict() of full tensors",
    element="module.weight.full_tensor()[i, j] is the element of the full parameter; parameter.detach()[i, j] that of "
    "the shard",
    infinities="use tp_ddp_bridge.GradScaler",
)


class ShardedTensor(ShardValue):
    """A sharded buffer, or the gradient of a leaf."""

    _ways = _WAYS


class ShardedLeaf(Refusing, nn.Parameter):
    """Leaf that holds one rank's shard.

    Within a step of an optimizer it is an ordinary parameter (`as_plain`), and its gradient an ordinary tensor: torch
    takes multi-tensor and fused kernels for no other class. Reading an attribute of a class with `__torch_function__`
    takes 1.5 us in place of 0.1, so `grad`, which `zero_grad` and clipping read, has a property of its own.
    """

    _ways = _WAYS

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]  # on purpose
        """Return an ordinary parameter: a copy of a leaf (`copy.deepcopy`) has no layout."""
        return nn.Parameter(data, requires_grad)

    def _get_grad(self) -> torch.Tensor | None:
        with without_overrides():
            grad: Any = TORCH_GRAD.__get__(self)
            # The gradient stays the same object, as `p.grad is p.grad` and `p.grad.data = x` rely on it.
            if type(grad) is torch.Tensor and grad.layout is torch.strided and not torch.compiler.is_compiling():
                grad.__class__ = ShardedTensor
                grad.__dict__[ATTRIBUTE] = bridge_tag(self)
        return grad  # type: ignore[no-any-return]  # a tensor, or None

    def _set_grad(self, value: torch.Tensor | None) -> None:
        with without_overrides():
            TORCH_GRAD.__set__(self, value)

    grad = property(_get_grad, _set_grad)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register a hook on the gradient as torch does; what it reads of the gradient is refused as of the leaf."""
        layout = bridge_tag(self)

        def hook_of_shard(grad: torch.Tensor) -> Any:
            shard: Any = grad.as_subclass(ShardedTensor)
            shard._sharding_info = layout
            return hook(shard)

        with without_overrides():
            return super().register_hook(hook_of_shard)  # type: ignore[no-untyped-call]  # torch's


#: Torch's own property: classes here set another one over it.
TORCH_GRAD: Any = torch.Tensor.grad


def as_plain(tensors: Iterable[Any]) -> list[Any]:
    """Give sharded leaves among ``tensors`` and their gradients torch's classes; return these leaves."""
    leaves: list[Any] = [each for each in tensors if isinstance(each, Refusing)]
    for leaf in leaves:
        leaf.__class__ = nn.Parameter if type(leaf) is ShardedLeaf else torch.Tensor
        grad: Any = leaf.grad
        if isinstance(grad, ShardedTensor):
            grad.__class__ = torch.Tensor  # type: ignore[assignment]
    return leaves


def refuse_full_reads(leaf: Any) -> None:
    """Give a sharded leaf its class. A leaf of another class, as in ``FakeTensorMode``, keeps that."""
    kind = type(leaf)
    leaf.__class__ = ShardedLeaf if kind is nn.Parameter else ShardedTensor if kind is torch.Tensor else kind


def tag_leaf(leaf: Any, layout: Layout) -> None:
    """Tag a leaf with its layout."""
    leaf._sharding_info = tuple(layout[:4])  # no sections: every version reads this form
    leaf._bridge = layout  # distinguishes it from other local shards
    if layout.sharded_axes():
        refuse_full_reads(leaf)


def tag_replicated(parameters: Iterable[nn.Parameter], on: Layout) -> None:
    """Tag every parameter other than DTensors and shards as replicated on a mesh."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and not hasattr(parameter, "_sharding_info"):
            tagged: Any = parameter
            tagged._bridge = ReplicatedLayout(on.mesh, on.placements, parameter.shape, tuple(parameter.stride()))
            tagged._sharding_info = tuple(tagged._bridge[:4])


def untag_replicated(parameter: Any) -> None:
    """Undo ``tag_replicated``."""
    if is_replicated_tag(parameter):
        del parameter._bridge, parameter._sharding_info


def bridge_tag(parameter: torch.Tensor) -> Layout | None:
    """Return the tagged layout of a parameter of a bridged module; ``None`` for any other."""
    return parameter.__dict__.get(BRIDGED)


def is_replicated_tag(parameter: torch.Tensor) -> bool:
    """Return True if ``tag_replicated`` set the layout of this parameter."""
    return isinstance(bridge_tag(parameter), ReplicatedLayout)


LEAF_TAGS = frozenset({"_sharding_info", BRIDGED})
