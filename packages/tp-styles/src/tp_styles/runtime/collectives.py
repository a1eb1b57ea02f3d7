"""The tensor-parallel axis at run time: a thin layer over collectives, replaceable in tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._shared.consensus import all_gather_objects
from tp_styles._torch_compat import all_gather_into, functional_collectives, is_compiling, reduce_scatter_into


class TPGroup:
    """Collectives over a 1-D mesh on local tensors. Outputs are fresh, inputs untouched, unless a name ends in `_`.

    Args:
        mesh: 1-D device mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        assert mesh.ndim == 1, mesh
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        if self._group is None:  # first use, also after a copy or a pickle
            self._group = self.mesh.get_group()
        return self._group

    # Process groups can be neither copied nor pickled; the mesh can, and finds its groups again.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> TPGroup:
        return self  # copies of a model share it

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if is_compiling():  # in a graph: functional collectives
            return self.all_reduce(x)
        if x.is_contiguous():
            dist.all_reduce(x, group=self.group)
            return x
        return x.copy_(self.all_reduce(x))  # collectives need contiguous memory

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        if is_compiling():
            reduced: torch.Tensor = functional_collectives.all_reduce(x, "sum", (self.mesh, 0))
            return reduced
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def all_reduce_max_(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; `x` is contiguous."""
        if is_compiling():
            greatest: torch.Tensor = functional_collectives.all_reduce(x, "max", (self.mesh, 0))
            return greatest
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate all ranks' shards along `dim`; `sizes` if they differ."""
        return torch.cat(self.gather_parts(x, dim, sizes), dim=dim)

    def gather_parts(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return all ranks' shards, in rank order; `sizes` along `dim` if they differ."""
        if sizes is None or len(set(sizes)) == 1:
            return self._stacked(x)
        parts = self._stacked(_padded(x, dim, max(sizes)))  # collectives need one size
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def _stacked(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        if is_compiling():
            flat = functional_collectives.all_gather_tensor(x.reshape(1, -1), 0, (self.mesh, 0))
            return [part.view(x.shape) for part in flat.unbind(0)]
        out = x.new_empty((self.size, *x.shape))
        # As bytes: backends do not know every type.
        all_gather_into(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), self.group)
        return list(out.unbind(0))

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's shard along `dim` of the sum over the ranks; `sizes` has all ranks' lengths."""
        pieces = torch.split(x, list(sizes), dim=dim)
        largest = max(sizes)
        stacked = torch.stack([_padded(chunk, dim, largest) for chunk in pieces])  # shards of one size
        if is_compiling():
            out = functional_collectives.reduce_scatter_tensor(stacked, "sum", 0, (self.mesh, 0)).squeeze(0)
        else:
            out = stacked.new_empty(stacked.shape[1:])
            flat_in, flat_out = stacked.view(-1), out.view(-1)
            reduce_scatter_into(flat_out, flat_in, self.group)
        own = sizes[self.rank]
        part: torch.Tensor = out if own == largest else out.narrow(dim, 0, own).contiguous()  # without padding
        return part

    def all_to_all(
        self,
        x: torch.Tensor,
        source_dim: int,
        dim: int,
        source_sizes: Sequence[int],
        sizes: Sequence[int],
    ) -> torch.Tensor:
        """Exchange shards of `source_dim` for shards of `dim`; both lists of sizes are by rank."""
        pieces = [chunk.contiguous() for chunk in torch.split(x, list(sizes), dim=dim)]
        packed = torch.cat([chunk.reshape(-1) for chunk in pieces])
        shapes = []
        for size in source_sizes:  # shape of the block from each rank
            shape = list(x.shape)
            shape[source_dim], shape[dim] = size, sizes[self.rank]
            shapes.append(shape)
        received = [math.prod(shape) for shape in shapes]
        sent = [chunk.numel() for chunk in pieces]
        if is_compiling():
            out = functional_collectives.all_to_all_single(packed, received, sent, (self.mesh, 0))
        else:
            out = packed.new_empty(sum(received))
            dist.all_to_all_single(out, packed, received, sent, group=self.group)
        parts = [part.view(shape) for part, shape in zip(torch.split(out, received), shapes, strict=True)]
        return torch.cat(parts, dim=source_dim)

    def all_gather_objects(self, value: Any, subject: str) -> list[Any]:
        """Gather picklable objects of all ranks; a dead peer is an error with `subject`."""
        return all_gather_objects(self.group, value, subject)

    def slice(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's shard of `x` along `dim` (a view)."""
        return x.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank])


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
