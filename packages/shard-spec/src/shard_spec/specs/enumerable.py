"""ChunkShardingSpec and EnumerableShardingSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.intervals import Box, chunk
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.specs.base import ShardingSpec, box_of_each_rank
from shard_spec.specs.shards import (
    DeviceLike,
    RemoteDevice,
    ShardMetadata,
    TensorShards,
    cover_problems,
    overlap_problems,
)


@dataclass(frozen=True, init=False)
class ChunkShardingSpec(ShardingSpec):
    """Shard ``dim`` into one chunk for each device; chunk ``i`` lies on ``placements[i]``.

    All chunks but the last have length ``ceil(length / count)``, as in ``torch.chunk``: 9 rows on 8 devices are
    2, 2, 2, 2, 1, 0, 0, 0 at offsets 0, 2, 4, 6, 8, 9, 9, 9.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        placements: Devices (not DTensor placements), for example ``["rank:0/cuda:0", "rank:1/cuda:1"]``, in the
            order of the chunks. Torch's remote devices are accepted. The sequence is copied.

    Raises:
        PlanError: ``invalid-layout`` or ``missing-argument``, all of them at once.
    """

    dim: int
    placements: tuple[RemoteDevice, ...]

    def __init__(self, dim: int, placements: Sequence[DeviceLike]) -> None:
        problems: list[Problem] = []
        if isinstance(dim, bool) or not isinstance(dim, int):
            problems.append(Problem("invalid-layout", "dim", found=repr(dim), hint="a dim is an integer"))
        if isinstance(placements, str):
            placements = [placements]  # not one device per letter
        devices = []
        for placement in placements:
            try:
                devices.append(RemoteDevice(placement))
            except PlanError as error:
                problems.extend(error.problems)
        if not problems and not devices:
            hint = "name at least one device, as in ['rank:0/cpu']"
            problems.append(Problem("missing-argument", "placements", found="an empty list", hint=hint))
        raise_problems(problems)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", tuple(devices))

    def normalized(self, ndim: int) -> ChunkShardingSpec:
        """Return an equal spec with a dim from 0 to ``ndim - 1``.

        Raises:
            PlanError: ``dim-out-of-range`` if a tensor of ``ndim`` dims has no such dim.
        """
        if not -ndim <= self.dim < ndim:
            hint = f"use -{ndim} to {ndim - 1}" if ndim else "a tensor without dims cannot be sharded"
            reason = f"dim {self.dim} of a tensor of {ndim} dims"
            raise PlanError(Problem("dim-out-of-range", "dim", dim=self.dim, found=reason, hint=hint))
        return ChunkShardingSpec(self.dim % ndim, self.placements)

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """See ``ShardingSpec.build_metadata``; offsets never exceed the tensor."""
        shape = tuple(tensor_sizes)
        dim = self.normalized(len(shape)).dim
        shards = [
            ShardMetadata(box.offsets, box.sizes, device)
            for index, device in enumerate(self.placements)
            for box in [self._box(index, dim, shape)]
        ]
        return TensorShards(shards, shape, tensor_properties)

    def to_layout(self, shape: Sequence[int]) -> Layout:
        """See ``ShardingSpec.to_layout``; permuted devices give a permuted mesh."""
        shape = tuple(shape)
        dim, ranks = self.normalized(len(shape)).dim, tuple(box_of_each_rank(self, shape))
        return Layout(MeshSpec({f"shard{dim}": len(ranks)}, ranks), [f"S({dim})"])

    def _box(self, index: int, dim: int, shape: tuple[int, ...]) -> Box:
        start, length = chunk(shape[dim], len(self.placements), index)
        offsets = tuple(start if at == dim else 0 for at in range(len(shape)))
        return Box(offsets, (*shape[:dim], length, *shape[dim + 1 :]))


@dataclass(frozen=True, init=False)
class EnumerableShardingSpec(ShardingSpec):
    """A tensor with arbitrary shards: one ``ShardMetadata`` for each.

    Args:
        shards: The shards. No two may share an element. Torch's shard metadata is accepted.
            The sequence is copied.

    Raises:
        PlanError: ``boxes-incomplete``, ``shape-mismatch`` or ``boxes-overlap``.
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Sequence[ShardMetadata | Any]) -> None:
        object.__setattr__(self, "shards", tuple(as_shard(shard) for shard in shards))
        raise_problems(self._problems())

    def _problems(self) -> list[Problem]:
        if not self.shards:
            return [
                Problem("boxes-incomplete", "shards", found="an empty list", hint="give at least one ShardMetadata")
            ]
        ndims = sorted({len(shard.shard_sizes) for shard in self.shards})
        if len(ndims) > 1:
            hint = "all shards are shards of one tensor"
            return [Problem("shape-mismatch", "shards", found=f"shards of {ndims} dims", hint=hint)]
        return overlap_problems([shard.box for shard in self.shards], "shards")  # holes show with a shape

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """See ``ShardingSpec.build_metadata``; raises ``PlanError`` if the shards do not tile ``tensor_sizes``."""
        raise_problems(cover_problems([shard.box for shard in self.shards], tensor_sizes, "shards"))
        return TensorShards(self.shards, tensor_sizes, tensor_properties)


def as_shard(given: object) -> ShardMetadata:
    """Convert a shard's metadata, ours or torch's, to ours."""
    if isinstance(given, ShardMetadata):
        return given
    if all(hasattr(given, name) for name in ("shard_offsets", "shard_sizes", "placement")):
        torch_shard: Any = given
        return ShardMetadata(torch_shard.shard_offsets, torch_shard.shard_sizes, torch_shard.placement)
    hint = "give ShardMetadata(shard_offsets, shard_sizes, placement)"
    raise PlanError(Problem("wrong-type", "shards", found=f"{given!r} of type {type(given).__qualname__}", hint=hint))
