"""One rank's chunks of a global tensor, for torch.distributed.checkpoint (DCP): nothing is gathered.

DCP looks for three methods by name, on any tensor. So shards that no DTensor placement describes (fused weights,
copied key-value heads, blocks of an uneven layout) are saved, and loaded in place, under any other layout. Ranks with
copies offer equal chunks, and DCP writes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class ChunkedTensor(torch.Tensor):
    """A tensor of a global shape of which this rank holds some boxes."""

    def plain(self) -> torch.Tensor:
        """Return this rank's local tensor."""
        raise NotImplementedError

    def chunks(self) -> Sequence[tuple[Sequence[int], torch.Tensor]]:
        """Return offset in the global tensor and values of each box that is not empty: views of the local tensor."""
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), view.shape) for offsets, view in self.chunks()]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties, kind = TensorProperties.create_from_tensor(self.plain()), WriteItemType.SHARD
        chunks = [(chunk, TensorWriteData(chunk, properties, self.shape)) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), kind, tensor_data=data) for chunk, data in chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, view in self.chunks():
            if torch.Size(offsets) == index.offset:
                return view
        places = [tuple(offsets) for offsets, _ in self.chunks()]
        raise ValueError(f"{index.fqn}: this rank holds no chunk at {index.offset}, only at {places}")
