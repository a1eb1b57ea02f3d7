"""What a state dict holds for a local parameter that a DTensor cannot describe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tp_styles._shared.sharding_info import ATTRIBUTE, ShardingInfo, sharding_info_of
from tp_styles._torch_compat import tree_map
from tp_styles.runtime.axis import Axis
from tp_styles.runtime.parameters import full_tensor
from tp_styles.runtime.shard_parameter import split_of
from tp_styles.split import Split

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class PartTensor(torch.Tensor):
    """One rank's sections of a global tensor: fused weights, few key-value heads over many ranks.

    It shares memory with the parameter. `torch.distributed.checkpoint` saves and loads it without gathering, one chunk
    for each section, to and from any layout; `full_tensor()` gathers. What is computed with it is a plain tensor.
    """

    _sharding_info: ShardingInfo

    @classmethod
    def of(cls, local: torch.Tensor, info: ShardingInfo) -> PartTensor:
        """A view of a local tensor with what it is a part of."""
        part = local.detach().as_subclass(cls)
        part._sharding_info = info
        if (read := sharding_info_of(part)) is not None:  # a plain tuple after pickling
            setattr(part, ATTRIBUTE, read)
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are plain tensors: they are no longer the part that the info speaks of."""
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, PartTensor) else x, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartTensor.of, (self.plain(), self._sharding_info)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartTensor:
        return PartTensor.of(self.plain().clone(), self._sharding_info)

    def plain(self) -> torch.Tensor:
        """The local tensor as a plain one; the same memory."""
        return self.as_subclass(torch.Tensor)

    @property
    def division(self) -> Split:
        """How the global tensor is divided."""
        return split_of(self._sharding_info)

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the global tensor."""
        return self._sharding_info.shape

    # As with a DTensor, its shape is the global one; `torch.distributed.checkpoint` compares it.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a plain attribute in torch's stubs
        """The global shape."""
        return self.global_shape

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one of its sizes."""
        return self.global_shape if dim is None else self.global_shape[dim]

    def full_tensor(self) -> torch.Tensor:
        """The global tensor, on every rank; every rank calls it."""
        return full_tensor(self.plain(), Axis(self._sharding_info.mesh), self.division)

    # ------------------------------------------------------------------ the protocol of torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """One item for each section."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.global_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where each section lies in the global tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.shape) for offsets, view in self._sections()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The section at that place, as a view."""
        for offsets, view in self._sections():
            if torch.Size(offsets) == index.offset:
                return view
        raise ValueError(f"{index.fqn}: no section at {index.offset} on this rank")

    def _sections(self) -> list[tuple[list[int], torch.Tensor]]:
        mesh, split, local = self._sharding_info.mesh, self.division, self.plain()
        assert split.dim is not None
        found = []
        at = 0
        for start, stop in split.ranges(mesh.get_local_rank(), mesh.size()):
            offsets = [0] * local.dim()
            offsets[split.dim] = start
            if stop > start:
                found.append((offsets, local.narrow(split.dim, at, stop - start)))
            at += stop - start
        return found
