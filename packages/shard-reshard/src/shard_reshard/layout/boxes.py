"""Layouts that are boxes given one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any

from shard_spec import Box

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import Cell, Index, Piece, ShardMap, shortened, sizes_of
from shard_reshard.layout.tiling import coverage_problems


class BoxShardMap(ShardMap):
    """Boxes given one by one: each rank has one local tensor for each of its boxes.

    A box that several ranks list is replicated on them.

    Args:
        shape: Shape of the global tensor.
        boxes: For each rank that takes part, its boxes in the order of its local tensors.
        holes: Elements that no rank has are allowed: in destinations that leave some out.

    Raises:
        PlanError: With every box outside of the shape, every hole and every overlap, by name.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]], holes: bool = False) -> None:
        self.shape = sizes_of(shape)
        try:
            self.boxes = {index(rank): tuple(found) for rank, found in sorted(boxes.items())}
        except TypeError as error:
            hint = "pass {rank: [Box(offsets, sizes), ...]}"
            raise PlanError(Problem("invalid-argument", "boxes", found=str(error), hint=hint)) from None
        problems = coverage_problems(self.shape, self.boxes)
        self.holes = bool(problems) and {problem.code for problem in problems} == {"boxes-incomplete"}
        if problems and not (holes and self.holes):
            raise PlanError(problems)
        self._arguments: tuple[Any, ...] = self.shape, self.boxes, self.holes

    @classmethod
    def whole(cls, shape: Sequence[int], rank: int) -> BoxShardMap:
        """The whole tensor on one rank."""
        return cls(shape, {rank: (Box((0,) * len(shape), tuple(shape)),)})

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, tuple(self.boxes.items())))

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self.boxes)

    @property
    def num_partials(self) -> int:
        return 1

    @property
    def max_replicas(self) -> int:
        return max((len(cell.owners[0]) for cell in self._sorted[1]), default=1)

    @cached_property
    def largest(self) -> int:
        return max((sum(box.numel for box in found) for found in self.boxes.values()), default=0)

    @property
    def reduce_ops(self) -> tuple[str, ...]:
        return ()

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        return tuple(box.sizes for box in self.boxes.get(rank, ()))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        zero = (0,) * len(self.shape)
        found = enumerate(self.boxes.get(rank, ()))
        return tuple(Piece(box.offsets, box.ends, tensor, zero) for tensor, box in found if box.numel)

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        dim, cells, starts, reach = self._sorted
        if dim < 0:
            yield from cells
            return
        last = bisect_left(starts, stop[dim])
        first = bisect_right(reach, start[dim])  # every cell before `first` ends at or before start
        for cell in cells[first:last]:
            low = tuple(map(max, cell.start, start))
            high = tuple(map(min, cell.stop, stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                local = tuple(a - b for a, b in zip(low, cell.start, strict=True))
                yield Cell(low, high, local, cell.owners, cell.tensors)

    @cached_property
    def _sorted(self) -> tuple[int, list[Cell], list[int], list[int]]:
        """The cells sorted along the dim that tells most of them apart, their starts, and how far they reach."""
        merged: dict[tuple[Index, Index], dict[int, int]] = {}
        for rank, boxes in self.boxes.items():
            for tensor, box in enumerate(boxes):
                if box.numel:
                    merged.setdefault((box.offsets, box.ends), {})[rank] = tensor
        zero = (0,) * len(self.shape)
        cells = [Cell(start, stop, zero, (tuple(at),), at) for (start, stop), at in merged.items()]
        if not self.shape:
            return -1, cells, [], []
        dim = max(range(len(self.shape)), key=lambda d: len({cell.start[d] for cell in cells}))
        cells.sort(key=lambda cell: (cell.start[dim], cell.start))
        reach, furthest = [], 0
        for cell in cells:
            furthest = max(furthest, cell.stop[dim])
            reach.append(furthest)
        return dim, cells, [cell.start[dim] for cell in cells], reach

    def to_json(self) -> dict[str, Any]:
        listed = [[rank, [[list(b.offsets), list(b.sizes)] for b in found]] for rank, found in self.boxes.items()]
        return {"boxes": listed, "holes": True} if self.holes else {"boxes": listed}

    def describe(self) -> str:
        if len(self.boxes) == 1:
            ((rank, boxes),) = self.boxes.items()
            if len(boxes) == 1 and boxes[0].sizes == self.shape:
                return f"whole on rank {rank}"
        return f"{sum(map(len, self.boxes.values()))} boxes on ranks {shortened(tuple(self.boxes))}"


class FusedShardMap(BoxShardMap):
    """Boxes of which each rank has one local tensor: its boxes one after the other along a dim.

    So lie fused weights, and key-value heads of which several ranks hold the same ones. Planning works on boxes, as if
    each were a tensor; `places` says where they are in the one that there is.

    Args:
        shape: Shape of the global tensor.
        boxes: For each rank its boxes, in their order in the local tensor; equal in all dims but ``dim``.
        dim: The dim along which they are joined.
        holes: See `BoxShardMap`.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]], dim: int, holes: bool = False) -> None:
        super().__init__(shape, boxes, holes)
        self.dim, self._arguments = dim, (self.shape, self.boxes, dim, self.holes)
        rests = {
            (rank, box.offsets[:dim] + box.offsets[dim + 1 :], box.sizes[:dim] + box.sizes[dim + 1 :])
            for rank, found in self.boxes.items()
            for box in found
        }
        if not 0 <= dim < len(self.shape) or len(rests) > len(self.boxes) or not all(self.boxes.values()):
            hint = "boxes of one local tensor differ along one dim only, and each rank has one at least"
            raise PlanError(Problem("boxes-incomplete", dim=dim, found=f"boxes of {self.shape}", hint=hint))

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        found = self.boxes.get(rank)
        if found is None:
            return ()
        size = sum(box.sizes[self.dim] for box in found)
        return ((*found[0].sizes[: self.dim], size, *found[0].sizes[self.dim + 1 :]),)

    def places(self, rank: int) -> tuple[tuple[int, Index], ...]:
        at, places = 0, []
        for box in self.boxes.get(rank, ()):
            places.append((0, tuple(at if dim == self.dim else 0 for dim in range(len(self.shape)))))
            at += box.sizes[self.dim]
        return tuple(places)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "joined": self.dim}

    def describe(self) -> str:
        return f"{super().describe()}, joined along dim {self.dim}"
