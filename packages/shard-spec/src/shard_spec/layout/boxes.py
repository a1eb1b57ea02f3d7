"""Boxes: the rectangular shards that a global tensor is cut into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from shard_spec._shared.problems import PlanError, Problem


@dataclass(frozen=True)
class Box:
    """A rectangular shard of a global tensor: where it begins and how large it is.

    Attributes:
        offsets: First index in each dim of the global tensor.
        sizes: Number of indices in each dim; 0 makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        # tuple() also turns torch.Size and lists into plain tuples, so that equal boxes compare equal.
        object.__setattr__(self, "offsets", tuple(int(offset) for offset in self.offsets))
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        if len(self.offsets) != len(self.sizes):
            raise PlanError(
                Problem(
                    "box-rank-mismatch",
                    found=f"{len(self.offsets)} offsets and {len(self.sizes)} sizes",
                    hint="give one offset and one size for each dim",
                )
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise PlanError(
                Problem("box-negative", found=f"{self!r}", hint="offsets and sizes are at least 0"),
            )

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the global tensor: ``tensor[box.slices()]``."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes, or None when they share no element."""
        if self.ndim != other.ndim:
            raise PlanError(
                Problem(
                    "box-rank-mismatch",
                    found=f"boxes of {self.ndim} and {other.ndim} dims",
                    hint="intersect boxes of the same global tensor",
                )
            )
        offsets, sizes = [], []
        for offset, size, other_offset, other_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            start = max(offset, other_offset)
            length = min(offset + size, other_offset + other_size) - start
            if length <= 0:
                return None
            offsets.append(start)
            sizes.append(length)
        return _box(tuple(offsets), tuple(sizes))

    def contains(self, index: Sequence[int]) -> bool:
        """Return whether the element at ``index`` of the global tensor lies in this box."""
        return all(
            offset <= at < offset + size for offset, size, at in zip(self.offsets, self.sizes, index, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of ``outer``, which has to hold it completely."""
        offsets = tuple(offset - start for offset, start in zip(self.offsets, outer.offsets, strict=True))
        inside = all(
            offset >= 0 and offset + size <= limit
            for offset, size, limit in zip(offsets, self.sizes, outer.sizes, strict=True)
        )
        if not inside:
            raise PlanError(
                Problem("box-not-inside", found=f"{self!r} is not inside {outer!r}", hint="intersect first")
            )
        return _box(offsets, self.sizes)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """A box from values that are known to be right; skips the checks, which cost more than the box."""
    box = object.__new__(Box)
    object.__setattr__(box, "offsets", offsets)
    object.__setattr__(box, "sizes", sizes)
    return box


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def grid(intervals: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """Boxes of a grid, row-major.

    Args:
        intervals: For each dim the ``(offset, size)`` intervals, in the order in which they lie in the local tensor.

    Returns:
        One box for each combination of intervals; without the empty ones.
    """
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for along in intervals:
        if len(along) == 1:
            offset, size = along[0]
            if size == 0:
                return ()
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes]
        else:
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes for offset, size in along if size]
    return tuple(_box(offsets, sizes) for offsets, sizes in boxes)


def total_numel(boxes: Iterable[Box]) -> int:
    """Number of elements in all ``boxes`` together, counting overlaps twice."""
    return sum(box.numel for box in boxes)
