"""How a local tensor lies in the global one.

Vocabulary used in all modules of this package:

- *leaf*: the plain local ``nn.Parameter`` (or buffer) that stands in the module for good; DDP and optimizers see
  leaves.
- *view*: the DTensor that is made of a leaf when the attribute is read; made anew, never stored in the module.
- *tie*: one leaf registered under several names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tp_ddp_bridge._torch_compat import local_of, make_spec, wrap

ShardingInfo: TypeAlias = "tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]]"


@dataclass(frozen=True)
class Layout:
    """Mesh, placements, global shape and global stride of a tensor of which this rank holds a part.

    Attributes:
        mesh: The mesh that the placements speak of, one placement per mesh axis.
        placements: Torch's own ``Shard`` and ``Replicate`` objects.
        shape: Global shape.
        stride: Global stride, in elements.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Layout:
        """The layout of an existing DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @classmethod
    def from_info(cls, info: tuple[Any, ...]) -> Layout:
        """The layout in a ``_sharding_info`` tuple; a fifth element (fused sections) says nothing about norms."""
        mesh, placements, shape, stride = info[:4]
        return cls(mesh, tuple(placements), torch.Size(shape), tuple(stride))

    @property
    def info(self) -> ShardingInfo:
        """The tuple that a leaf carries as ``_sharding_info``."""
        return (self.mesh, self.placements, self.shape, self.stride)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes, ``axis0``, ``axis1``, ... where the mesh has no names."""
        names = self.mesh.mesh_dim_names
        return tuple(names) if names else tuple(f"axis{index}" for index in range(self.mesh.ndim))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the mesh holds the whole tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def sharded_axes(self) -> tuple[int, ...]:
        """The mesh axes along which ranks hold different parts (axes of one rank left out)."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(axis) > 1
        )

    def wrap(self, local: torch.Tensor) -> DTensor:
        """``local`` as a DTensor of this layout: same memory, no autograd, no communication."""
        local = local.detach()
        spec = make_spec(self.mesh, self.placements, self.shape, self.stride, local.dtype)
        return wrap(local, spec, requires_grad=False)

    def localize(self, tensor: DTensor) -> torch.Tensor:
        """This rank's part of ``tensor`` in this layout.

        Communicates only if ``tensor`` lies otherwise: a redistribution on the same mesh, a gather on another mesh.
        """
        with torch.no_grad():
            if tensor.device_mesh != self.mesh:
                return self.cut(tensor.full_tensor())
            if tuple(tensor.placements) != self.placements:
                tensor = tensor.redistribute(self.mesh, self.placements)
            return local_of(tensor).detach()

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that every rank has; no communication."""
        if self.is_replicated:
            return full.detach()
        return local_of(distribute_tensor(full.detach(), self.mesh, self.placements, src_data_rank=None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __str__(self) -> str:
        places = ", ".join(f"{axis}={placement}" for axis, placement in zip(self.axes, self.placements, strict=True))
        return f"{tuple(self.shape)} on {places}"


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """The layout of a DTensor, or of a leaf that carries ``_sharding_info``; ``None`` if nothing is known."""
    if isinstance(tensor, DTensor):
        return Layout.of(tensor)
    info = getattr(tensor, "_sharding_info", None)
    return None if info is None else Layout.from_info(info)


def replicated_layout(mesh: DeviceMesh, tensor: torch.Tensor) -> Layout:
    """The layout of a plain tensor of which every rank of ``mesh`` holds the whole."""
    return Layout(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tuple(tensor.stride()))
