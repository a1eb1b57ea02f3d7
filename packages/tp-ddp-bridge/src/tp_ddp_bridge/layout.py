"""Sharding of one tensor, and the tags that parameters carry it in.

Vocabulary of this package:

- *leaf*: the plain local ``nn.Parameter`` (or buffer) that stands in the module for good. DDP and optimizers see
  leaves.
- *view*: the DTensor that reading the attribute gives. It is created on each read and never stored in the module.
- *tie*: one leaf registered under several names.
- *sections*: a fused or kv-copied weight that no placement describes (see ``_shared/sharding_info.py``). tp-styles
  makes them; the bridge leaves such parameters as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tp_ddp_bridge._shared.sharding_info import Section, ShardingInfo, sharding_info_of
from tp_ddp_bridge._torch_compat import local_of, make_spec, wrap


@dataclass(frozen=True)
class LocalRange:
    """One run of rows of a sectioned leaf.

    Attributes:
        dim: Tensor dim of the rows.
        start: First row in the global tensor.
        offset: First row in the leaf.
        length: Number of rows.
    """

    dim: int
    start: int
    offset: int
    length: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return these rows of the leaf, sharing its memory."""
        return local.narrow(self.dim, self.offset, self.length)


@dataclass(frozen=True)
class Layout:
    """Mesh, placements, global shape and global stride of a tensor of which this rank holds a shard.

    Attributes:
        mesh: One placement per mesh axis.
        placements: Torch's own ``Shard`` and ``Replicate`` objects.
        shape: Global shape.
        stride: Global stride, in elements.
        sections: Sections of the sharded dim where placements alone would misdescribe it, else empty.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, tensor: DTensor) -> Layout:
        """Return the layout of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @classmethod
    def from_info(cls, info: ShardingInfo) -> Layout:
        """Return the layout that a local parameter carries."""
        return cls(*info[:4], info.sections if info.needs_sections else ())

    @property
    def info(self) -> ShardingInfo:
        """The tuple that a leaf carries as ``_sharding_info``."""
        return ShardingInfo(self.mesh, self.placements, self.shape, self.stride, self.sections)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes; ``axis0``, ``axis1``, ... where the mesh has none."""
        names = self.mesh.mesh_dim_names
        return tuple(names) if names else tuple(f"axis{index}" for index in range(self.mesh.ndim))

    @property
    def is_replicated(self) -> bool:
        """Every rank of the mesh holds the full tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def sharded_axes(self) -> tuple[int, ...]:
        """Return the mesh axes along which ranks hold different shards, axes of one rank left out."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(axis) > 1
        )

    def local_ranges(self) -> tuple[LocalRange, ...]:
        """Return what each section contributes to this rank's leaf, possibly no rows."""
        axis, dim = self.info.section_axis()
        rank, offset, found = self.mesh.get_local_rank(axis), 0, []
        for start, stop in self.info.ranges(rank):
            found.append(LocalRange(dim, start, offset, stop - start))
            offset += stop - start
        return tuple(found)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return ``local`` as a DTensor: same memory, no autograd, no communication. Not for sections."""
        assert not self.sections, "placements would misdescribe it"
        local = local.detach()
        spec = make_spec(self.mesh, self.placements, self.shape, self.stride, local.dtype)
        return wrap(local, spec, requires_grad=False)

    def localize(self, tensor: DTensor) -> torch.Tensor:
        """Return this rank's shard of ``tensor`` in this layout.

        Communicates only if ``tensor`` is laid out otherwise: a redistribution on the same mesh, a gather on another.
        """
        with torch.no_grad():
            if tensor.device_mesh != self.mesh or self.sections:
                return self.shard(tensor.full_tensor())
            if tuple(tensor.placements) != self.placements:
                tensor = tensor.redistribute(self.mesh, self.placements)
            return local_of(tensor).detach()

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor that every rank holds; no communication."""
        full = full.detach()
        if self.is_replicated:
            return full
        if self.sections:
            rows = [full.narrow(each.dim, each.start, each.length) for each in self.local_ranges()]
            return torch.cat(rows, dim=self.info.section_axis()[1])
        return local_of(distribute_tensor(full, self.mesh, self.placements, src_data_rank=None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self  # a value; and a copied DeviceMesh would equal no other

    def __str__(self) -> str:
        places = ", ".join(f"{axis}={placement}" for axis, placement in zip(self.axes, self.placements, strict=True))
        sections = f" in sections {[tuple(section) for section in self.sections]}" if self.sections else ""
        return f"{tuple(self.shape)} on {places}{sections}"


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor, or of a tensor with ``_sharding_info``; ``None`` if it is unknown."""
    if isinstance(tensor, DTensor):
        return Layout.of(tensor)
    tags = tensor.__dict__
    tagged: Layout | None = tags.get("_dp_leaf") or tags.get("_dp_replicated")
    if tagged is not None:
        return tagged
    info = sharding_info_of(tensor)
    return None if info is None else Layout.from_info(info)


def is_local_shard(tensor: torch.Tensor) -> bool:
    """Return whether this is a plain tensor that holds less than the full one."""
    if isinstance(tensor, DTensor):
        return False
    layout = layout_of(tensor)
    return layout is not None and bool(layout.sharded_axes())


# ---- tags. Torch drops attributes of parameters when it copies or replaces them, so modules set them again whenever
# ---- that can have happened.


@dataclass(frozen=True)
class ReplicatedOn:
    """The mesh on which a module's plain parameters are replicated: the largest of its DTensors' meshes."""

    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedOn:
        return self


def tag_leaf(leaf: Any, layout: Layout) -> None:
    """Let a leaf carry its layout."""
    leaf._sharding_info = tuple(layout.info[:4])  # no sections: the form that every version reads
    leaf._dp_leaf = layout  # tells it from local shards that others made


def tag_replicated(parameters: Iterable[nn.Parameter], on: ReplicatedOn) -> None:
    """Let every parameter that is neither a DTensor nor a shard carry that it is replicated."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and not hasattr(parameter, "_sharding_info"):
            tagged: Any = parameter
            layout = Layout(on.mesh, (Replicate(),) * on.mesh.ndim, parameter.shape, tuple(parameter.stride()))
            tagged._sharding_info = tuple(layout.info[:4])
            tagged._dp_replicated = layout


def untag_replicated(parameter: Any) -> None:
    """Undo ``tag_replicated``."""
    if parameter.__dict__.pop("_dp_replicated", None) is not None:
        del parameter._sharding_info


def is_replicated_tag(parameter: torch.Tensor) -> bool:
    """Return whether ``tag_replicated`` set the layout of this parameter."""
    return "_dp_replicated" in parameter.__dict__


def is_tagged(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to a bridged module."""
    return "_dp_leaf" in parameter.__dict__ or "_dp_replicated" in parameter.__dict__


LEAF_TAGS = frozenset({"_sharding_info", "_dp_leaf", "_dp_assigned"})
