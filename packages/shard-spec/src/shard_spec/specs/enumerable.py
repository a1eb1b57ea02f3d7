"""EnumerableShardingSpec: every shard written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.specs.base import ShardingSpec
from shard_spec.specs.geometry import cover_problems, overlap_problems
from shard_spec.specs.shards import ShardMetadata, TensorShards


@dataclass(frozen=True, init=False)
class EnumerableShardingSpec(ShardingSpec):
    """A tensor cut in any way: one ``ShardMetadata`` for each shard.

    Args:
        shards: The shards. None may share an element with another. Torch's shard metadata is welcome.
            The sequence is copied.

    Raises:
        PlanError: ``no-shards``, ``shard-rank-mismatch`` or ``shards-overlap``.
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Sequence[ShardMetadata | Any]) -> None:
        object.__setattr__(self, "shards", tuple(_as_shard(shard) for shard in shards))
        raise_problems(self._problems())

    def _problems(self) -> list[Problem]:
        if not self.shards:
            return [Problem("no-shards", "shards", found="an empty list", hint="give at least one ShardMetadata")]
        ndims = sorted({len(shard.shard_sizes) for shard in self.shards})
        if len(ndims) > 1:
            return [
                Problem(
                    "shard-rank-mismatch",
                    "shards",
                    found=f"shards of {ndims} dims",
                    hint="all shards are shards of one tensor",
                )
            ]
        return overlap_problems([shard.box for shard in self.shards], "shards")

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """See ``ShardingSpec.build_metadata``; raises ``PlanError`` when the shards are no cut of ``tensor_sizes``."""
        raise_problems(cover_problems([shard.box for shard in self.shards], tensor_sizes, "shards"))
        return TensorShards(self.shards, tensor_sizes, tensor_properties)


def _as_shard(given: object) -> ShardMetadata:
    if isinstance(given, ShardMetadata):
        return given
    if all(hasattr(given, name) for name in ("shard_offsets", "shard_sizes", "placement")):
        torch_shard: Any = given
        return ShardMetadata(torch_shard.shard_offsets, torch_shard.shard_sizes, torch_shard.placement)
    raise PlanError(
        Problem(
            "bad-shard",
            "shards",
            found=f"{given!r} of type {type(given).__qualname__}",
            hint="give ShardMetadata(shard_offsets, shard_sizes, placement)",
        )
    )
