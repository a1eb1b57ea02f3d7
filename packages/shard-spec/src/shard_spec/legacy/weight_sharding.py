"""WeightSharding: how the two dims of a weight lie on the ranks of a group, as the sharded forwards ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from shard_spec.distributed.exchange import Columns, RowExchange
from shard_spec.layout.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class WeightSharding:
    """A two-dimensional weight cut over a group; every interval is contiguous.

    Attributes:
        layout: Where the weight lies; plain shards and replicas only.
        shape: Global shape of the weight.
        ranks: Global ranks of the group, in group order.
    """

    layout: Layout
    shape: tuple[int, int]
    ranks: tuple[int, ...]

    @cached_property
    def rows(self) -> Columns:
        """For each rank of the group, its ``(start, size)`` interval of dim 0."""
        return self._intervals(0)

    @cached_property
    def columns(self) -> Columns:
        """For each rank of the group, its ``(start, size)`` interval of dim 1."""
        return self._intervals(1)

    def _intervals(self, dim: int) -> Columns:
        return tuple(self.layout.intervals(rank, self.shape)[dim][0] for rank in self.ranks)

    @cached_property
    def primary(self) -> tuple[bool, ...]:
        """For each rank of the group, whether it stands for its replicas."""
        return tuple(self.layout.is_primary(rank) for rank in self.ranks)

    def is_first_replica(self, rank: int, dim: int) -> bool:
        """Return whether ``rank`` of the group is the first of those that share its interval of the other dim."""
        coordinate = self.layout.mesh.coordinate(self.ranks[rank])
        assert coordinate is not None
        return all(at == 0 for at, spec in zip(coordinate, self._specs, strict=True) if spec == dim)

    @cached_property
    def _specs(self) -> tuple[int | None, ...]:
        """The dim that each mesh axis cuts, counted from the front."""
        return tuple(None if spec.dim is None else spec.dim % 2 for spec in self.layout.specs)

    def placements(self, by_dim: dict[int, Placement], replicate: Placement) -> tuple[Placement, ...]:
        """One placement for each mesh axis: ``by_dim[d]`` where it cuts dim ``d``, else ``replicate``."""
        return tuple(replicate if dim is None else by_dim[dim] for dim in self._specs)

    def exchange(self, group: dist.ProcessGroup, rows: tuple[int, ...], dim: int) -> RowExchange:
        """The exchange between ``rows`` of the batch and the columns that ``dim`` of the weight meets.

        Args:
            group: The group.
            rows: Rows of the batch by rank.
            dim: Dim of the weight along which a row of the batch is cut.
        """
        intervals = self.rows if dim == 0 else self.columns
        return RowExchange(group, rows, intervals, self.shape[dim], self.primary)
