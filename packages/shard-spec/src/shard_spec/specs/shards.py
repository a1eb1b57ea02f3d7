"""ShardMetadata: one shard of a tensor, and what a spec makes of a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.layout.boxes import Box
from shard_spec.specs.devices import DeviceLike, RemoteDevice


@dataclass(frozen=True, init=False)
class ShardMetadata:
    """Offset, size and device of one shard of the global tensor.

    Args:
        shard_offsets: First index in each dim of the global tensor.
        shard_sizes: Number of indices in each dim; 0 is an empty shard.
        placement: The device that holds it, for example ``"rank:0/cuda:0"``; None while nobody knows.

    Raises:
        PlanError: ``shard-rank-mismatch``, ``shard-negative`` or ``bad-placement``.
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: RemoteDevice | None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: DeviceLike | None = None
    ) -> None:
        # Copies: what the caller does to the lists afterwards changes no shard (and no hash).
        object.__setattr__(self, "shard_offsets", tuple(int(offset) for offset in shard_offsets))
        object.__setattr__(self, "shard_sizes", tuple(int(size) for size in shard_sizes))
        object.__setattr__(self, "placement", None if placement is None else RemoteDevice(placement))
        raise_problems(self._problems())

    def _problems(self) -> list[Problem]:
        problems = []
        if len(self.shard_offsets) != len(self.shard_sizes):
            problems.append(
                Problem(
                    "shard-rank-mismatch",
                    "shard_sizes",
                    found=f"{len(self.shard_offsets)} offsets and {len(self.shard_sizes)} sizes",
                    hint="give one offset and one size for each dim",
                )
            )
        for name, values in (("shard_offsets", self.shard_offsets), ("shard_sizes", self.shard_sizes)):
            if any(value < 0 for value in values):
                problems.append(
                    Problem("shard-negative", name, found=f"{list(values)}", hint="offsets and sizes are at least 0")
                )
        return problems

    @property
    def rank(self) -> int | None:
        """Global rank that holds the shard, or None where the placement does not name one."""
        return None if self.placement is None else self.placement.rank()

    @property
    def box(self) -> Box:
        """The shard of the global tensor, without the device."""
        return Box(self.shard_offsets, self.shard_sizes)


@dataclass(frozen=True, init=False)
class TensorShards:
    """All shards of one tensor: what ``ShardingSpec.build_metadata`` answers.

    Attributes:
        shards_metadata: The shards, in the order of the spec.
        size: Global shape.
        tensor_properties: What the caller of ``build_metadata`` passed, untouched.
    """

    shards_metadata: tuple[ShardMetadata, ...]
    size: tuple[int, ...]
    tensor_properties: object

    def __init__(
        self, shards_metadata: Sequence[ShardMetadata], size: Sequence[int], tensor_properties: object = None
    ) -> None:
        object.__setattr__(self, "shards_metadata", tuple(shards_metadata))
        object.__setattr__(self, "size", tuple(int(length) for length in size))
        object.__setattr__(self, "tensor_properties", tensor_properties)
