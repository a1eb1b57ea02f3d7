"""Parts of tensors as layouts of their own; and any bound layout from what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from shard_spec import Box, Layout, MeshSpec

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import Cell, Index, Piece, ShardMap
from shard_reshard.layout.boxes import BoxShardMap, FusedShardMap
from shard_reshard.layout.mesh import MeshShardMap


class ShardMapView(ShardMap):
    """A box of a larger tensor as a tensor of its own, lying where it lies in the larger one's local tensors.

    The way to move q, k and v into one fused weight: each is a window of it.

    Args:
        base: How the larger tensor lies.
        start: Where the window begins in it.
        shape: How large the window is.
    """

    def __init__(self, base: ShardMap, start: Sequence[int], shape: Sequence[int]) -> None:
        self.base = base
        self.start, self.shape = tuple(start), tuple(shape)
        self._arguments = base, self.start, self.shape
        ends = tuple(a + b for a, b in zip(self.start, self.shape, strict=True))
        if any(low < 0 or end > size for low, end, size in zip(self.start, ends, base.shape, strict=True)):
            found = f"window {Box(tuple(max(0, low) for low in self.start), self.shape)!r} of a tensor of {base.shape}"
            raise PlanError(Problem("index-out-of-range", found=found, hint="a window lies inside of the tensor"))

    @property
    def holes(self) -> bool:  # type: ignore[override]  # of the larger tensor
        return self.base.holes

    @property
    def ranks(self) -> Sequence[int]:
        return self.base.ranks

    @property
    def num_partials(self) -> int:
        return self.base.num_partials

    @property
    def max_replicas(self) -> int:
        return self.base.max_replicas

    @property
    def largest(self) -> int:
        return min(prod(self.shape), self.base.largest)

    @property
    def reduce_ops(self) -> tuple[str, ...]:
        return self.base.reduce_ops

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return self.base.local_shapes(rank)

    def places(self, rank: int) -> tuple[tuple[int, Index], ...] | None:
        return self.base.places(rank)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        found = []
        stop = tuple(a + b for a, b in zip(self.start, self.shape, strict=True))
        for piece in self.base.pieces(rank):
            low, high = tuple(map(max, piece.start, self.start)), tuple(map(min, piece.stop, stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(at + a - b for at, a, b in zip(piece.local_start, low, piece.start, strict=True))
                found.append(Piece(self._inside(low), self._inside(high), piece.tensor, local))
        return tuple(found)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        for cell in self.base.cross(self._outside(start), self._outside(stop)):
            yield cell._replace(start=self._inside(cell.start), stop=self._inside(cell.stop))

    def to_json(self) -> dict[str, Any]:
        return {"window": list(self.start), "of": self.base.to_json(), "shape": list(self.base.shape)}

    def describe(self) -> str:
        return f"from {self.start} on in {self.base.shape}, {self.base.describe()}"

    def _inside(self, index: Index) -> Index:
        return tuple(a - b for a, b in zip(index, self.start, strict=True))

    def _outside(self, index: Index) -> Index:
        return tuple(a + b for a, b in zip(index, self.start, strict=True))


def shard_map_from_json(shape: Sequence[int], data: Mapping[str, Any]) -> ShardMap:
    """Read what ``to_json`` wrote."""
    if "window" in data:
        return ShardMapView(shard_map_from_json(data["shape"], data["of"]), data["window"], shape)
    if "boxes" in data:
        boxes = {rank: [Box(tuple(o), tuple(s)) for o, s in found] for rank, found in data["boxes"]}
        holes = data.get("holes", False) is True
        if "joined" in data:
            return FusedShardMap(shape, boxes, data["joined"], holes)
        return BoxShardMap(shape, boxes, holes)
    mesh = MeshSpec(dict(data["mesh"]), data["ranks"])
    return MeshShardMap(Layout.parse(data["layout"], mesh), shape)
