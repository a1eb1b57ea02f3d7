"""SectionedTensor: an entry of a state dict for a shard with several sections, or with copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from ._torch_compat import tree_map
from .chunked_tensor import ChunkedTensor
from .consensus import as_bytes
from .sharding_info import ATTRIBUTE, ShardingInfo, sharding_info_of


class SectionedTensor(ChunkedTensor):
    """One rank's sections of a global tensor: fused weights, few key-value heads over many ranks.

    It shares memory with its source. As with a DTensor its shape is the global one. Results of operations are plain
    tensors of the local shape; a copy on another device (``cpu_offload=True`` of DCP's state dicts) keeps its sections.
    """

    _sharding_info: ShardingInfo
    _is_sectioned = True  # also of another package's copy of this class: see `is_sectioned`

    @classmethod
    def of(cls, local: torch.Tensor, info: ShardingInfo) -> SectionedTensor:
        """Return a view of ``local`` with its sharding metadata."""
        shard = local.detach().as_subclass(cls)
        setattr(shard, ATTRIBUTE, info)
        setattr(shard, ATTRIBUTE, sharding_info_of(shard))  # of a plain tuple, after pickling
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda) and isinstance(args[0], SectionedTensor):
            return type(args[0]).of(result, args[0]._sharding_info)
        return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, SectionedTensor) else x, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SectionedTensor.of, (self.plain(), self._sharding_info)

    def __deepcopy__(self, memo: dict[int, Any]) -> SectionedTensor:
        return type(self).of(self.plain().clone(), self._sharding_info)

    def plain(self) -> torch.Tensor:
        """Return the local tensor as a plain one; the same memory."""
        return self.as_subclass(torch.Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a plain attribute in torch's stubs
        """The global shape."""
        return self._sharding_info.shape

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def chunks(self) -> Sequence[tuple[Sequence[int], torch.Tensor]]:
        """Return offset and values of each section of which this rank has rows."""
        info, local = self._sharding_info, self.plain()
        axis, dim = info.section_axis()
        rows = info.ranges(info.mesh.get_local_rank(axis))
        views = local.split([stop - start for start, stop in rows], dim)
        offsets = ([start if at == dim else 0 for at in range(local.dim())] for start, _ in rows)
        return [(offset, view) for offset, view in zip(offsets, views, strict=True) if view.numel()]

    def full_tensor(self) -> torch.Tensor:
        """Return the global tensor, bit for bit; a collective of the ranks of the sharding axis."""
        info, local = self._sharding_info, self.plain()
        axis, dim = info.section_axis()
        full, group = local.new_empty(info.shape), info.mesh.get_group(axis)
        if local.is_meta:
            return full
        ranges = [info.ranges(rank) for rank in range(info.mesh.size(axis))]
        rows = local.movedim(dim, 0)
        sent = rows.new_empty(max(sum(stop - start for start, stop in each) for each in ranges), *rows.shape[1:])
        sent[: len(rows)] = rows
        gathered = [torch.empty_like(sent) for _ in ranges]
        dist.all_gather([as_bytes(each) for each in gathered], as_bytes(sent), group=group)  # bytes: of any dtype
        for values, each in zip(gathered, ranges, strict=True):
            sizes = [stop - start for start, stop in each]
            for (start, _), part in zip(each, values[: sum(sizes)].split(sizes), strict=True):
                full.narrow(dim, start, len(part)).copy_(part.movedim(0, dim))
        return full


def is_sectioned(value: object) -> TypeGuard[SectionedTensor]:
    """True for an entry with sections, of whichever package.

    Each package has this file under a name of its own: an entry of tp-styles' `state_dict()` is no `SectionedTensor` of
    tp-ddp-bridge. Taken for a plain tensor, it would show the global shape with one rank's memory.
    """
    return hasattr(type(value), "_is_sectioned")
