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

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_ddp_bridge._shared.full_reads import FULL_READS
from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge._shared.sharding_info import ShardingInfo, sharding_info_of
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
        sharded = (axis for axis, placement in enumerate(self.placements) if not placement.is_replicate())
        return tuple(axis for axis in sharded if self.mesh.size(axis) > 1)

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


# ---- tags. Torch drops attributes of parameters when it copies or replaces them, so modules set them again after
# ---- every such call.


def tag_leaf(leaf: Any, layout: Layout) -> None:
    """Tag a leaf with its layout."""
    leaf._sharding_info = tuple(layout[:4])  # no sections: every version reads this form
    leaf._dp_leaf = layout  # distinguishes it from other local shards
    if layout.sharded_axes():
        vars(leaf).update(FULL_READ_REFUSALS)


_INITIALISE = "initialise before the module is sharded, or by load_state_dict() of full tensors"


def _refuse_full_read(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    # A draw into the DTensor `module.weight` is no way on: on CPU meshes torch draws equal numbers for all shards.
    read = f"module.weight.{name}(...) is of the full parameter, a DTensor; parameter.detach().{name}(...) of the shard"
    hint = _INITIALISE if name.endswith("_") else read
    raise PlanError(Problem("local-shard-as-full", f"{name}()", found=f"{name} of one rank's shard", hint=hint))


def _refuse_ndimension() -> NoReturn:
    reason = "nn.init's orthogonal_, eye_ and dirac_ call it, and would take one rank's shard for the full parameter"
    hint = f"{_INITIALISE}; parameter.dim() counts dims"
    raise PlanError(Problem("local-shard-as-full", "ndimension()", found=reason, hint=hint))


FULL_READ_REFUSALS = {
    # These three write by functions and by index, past the leaf's methods; they are the only callers of it in torch.
    "ndimension": _refuse_ndimension,
    **{
        name: functools.partial(_refuse_full_read, name)
        for func, name in FULL_READS.items()
        if getattr(torch.Tensor, name, None) is func
    },
}
"""Method of a sharded leaf -> its refusal, set on the leaf itself.

A class with ``__torch_function__`` would see ``torch.norm(leaf)`` as well, but torch then calls it at each read of
``leaf.grad`` and ``leaf.shape`` (3 us in place of 0.2: an SGD step of 100 leaves takes 3.3 ms in place of 0.5), and
optimizers take no multi-tensor kernels for it.
"""


def allow_full_reads(parameter: torch.Tensor) -> None:
    """Take the refusals off a sharded leaf: its methods read the shard. For optimizers that say they know."""
    for name in FULL_READ_REFUSALS:
        vars(parameter).pop(name, None)


def tag_replicated(parameters: Iterable[nn.Parameter], on: Layout) -> None:
    """Tag every parameter other than DTensors and shards as replicated on a mesh."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and not hasattr(parameter, "_sharding_info"):
            tagged: Any = parameter
            layout = on._replace(shape=parameter.shape, stride=tuple(parameter.stride()))
            tagged._sharding_info = tuple(layout[:4])
            tagged._dp_replicated = layout


def untag_replicated(parameter: Any) -> None:
    """Undo ``tag_replicated``."""
    if parameter.__dict__.pop("_dp_replicated", None) is not None:
        del parameter._sharding_info


def bridge_tag(parameter: torch.Tensor) -> Layout | None:
    """Return the tagged layout of a parameter of a bridged module; ``None`` for any other."""
    tags = parameter.__dict__
    return tags.get("_dp_leaf") or tags.get("_dp_replicated")


def is_replicated_tag(parameter: torch.Tensor) -> bool:
    """Return True if ``tag_replicated`` set the layout of this parameter."""
    return "_dp_replicated" in parameter.__dict__


LEAF_TAGS = frozenset({"_sharding_info", "_dp_leaf", "_dp_assigned", *FULL_READ_REFUSALS})
