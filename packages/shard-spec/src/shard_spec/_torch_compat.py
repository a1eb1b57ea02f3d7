"""The one place where this package touches what torch keeps under an underscore.

Read against torch 2.13.0; the names below also stand in 2.11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def strided_shard_factor(placement: object) -> int | None:
    """The split factor of a DTensor strided shard, or None when ``placement`` is something else."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """DTensor's strided shard: the dim is cut into ``split_factor`` sections and each section is sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard

    made: Any = _StridedShard(dim, split_factor=split_factor)
    return made  # type: ignore[no-any-return]  # the class is untyped in torch
