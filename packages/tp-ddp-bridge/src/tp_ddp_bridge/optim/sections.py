"""One rank's shard of a fused or kv-copied tensor, for ``torch.distributed.checkpoint``.

No DTensor placement describes such a shard, so it goes through checkpoints as one chunk for each section. Ranks with
copies offer equal chunks, and DCP writes one. Any other mesh, and one process, reads the global tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tp_ddp_bridge._torch_compat import tree_map
from tp_ddp_bridge.layout import Layout


class SectionedTensor(torch.Tensor):
    """A local shard with several sections or copies; shares memory with its source.

    As with a DTensor its shape is the global one. Results of operations are plain tensors.
    """

    _layout: Layout

    @classmethod
    def of(cls, local: torch.Tensor, layout: Layout) -> SectionedTensor:
        """Return a view of ``local`` with its layout."""
        shard = local.detach().as_subclass(cls)
        shard._layout = layout
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, SectionedTensor) else x, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SectionedTensor.of, (self.local(), self._layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> SectionedTensor:
        return SectionedTensor.of(self.local().clone(), self._layout)

    def local(self) -> torch.Tensor:
        """Return the shard as a plain tensor; the same memory."""
        return self.as_subclass(torch.Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a plain attribute in torch's stubs
        """The global shape."""
        return self._layout.shape

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def full_tensor(self) -> torch.Tensor:
        """Return the global tensor; every rank of the sharding axis calls it."""
        layout, local = self._layout, self.local()
        axis, dim = layout.section_axis()
        group = layout.mesh.get_group(axis)
        full = local.new_zeros(layout.shape)
        for (start, rows), section in zip(layout.section_views(local), layout.sections, strict=True):
            if group.rank() % section.copies == 0:  # one of the ranks with copies contributes
                full.narrow(dim, start, rows.shape[dim]).copy_(rows)
        dist.all_reduce(full, group=group)  # everything else is zero: shards may be uneven
        return full

    # ---- the protocol of torch.distributed.checkpoint

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the place of each section in the global tensor."""
        return [ChunkStorageMetadata(offsets=offsets, sizes=view.shape) for offsets, view in self._chunks()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return one item for each section."""
        properties, kind = TensorProperties.create_from_tensor(self.local()), WriteItemType.SHARD
        chunks = [(chunk, TensorWriteData(chunk, properties, self.shape)) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), kind, tensor_data=data) for chunk, data in chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the section at that place, sharing memory."""
        for offsets, view in self._chunks():
            if offsets == index.offset:
                return view
        raise ValueError(f"{index.fqn}: no section at {index.offset} on this rank")

    def _chunks(self) -> list[tuple[torch.Size, torch.Tensor]]:
        dim = self._layout.section_axis()[1]
        views = [(start, view) for start, view in self._layout.section_views(self.local()) if view.numel()]
        return [(torch.Size(start if each == dim else 0 for each in range(view.dim())), view) for start, view in views]
