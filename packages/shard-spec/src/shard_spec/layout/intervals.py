"""Boxes of a global tensor, and the composition of intervals ``(offset, size)`` of one dim in local order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.placements import Interval


def compose(outer: list[Interval], inner: list[Interval]) -> list[Interval]:
    """Compose intervals: ``inner`` counts along the concatenation of ``outer``, the result along the dim."""
    if len(outer) == 1:
        start = outer[0][0]
        return [(start + offset, size) for offset, size in inner]
    # One pass over both lists, which ascend along the local tensor: untrusted plans must not take quadratic time.
    result: list[Interval] = []
    remaining = iter(inner)
    offset, size = next(remaining, (0, 0))
    position = 0
    for start, length in outer:
        while size and offset < position + length:
            taken = min(size, position + length - offset)
            result.append((start + offset - position, taken))
            offset, size = (offset + taken, size - taken) if taken < size else next(remaining, (0, 0))
        position += length
    return result


def merge(found: list[Interval]) -> list[Interval]:
    """Join intervals that are adjacent both along the dim and in the local tensor."""
    merged: list[Interval] = []
    for offset, size in found:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged


@dataclass(frozen=True)
class Box:
    """A rectangular shard of a global tensor, as offsets and sizes.

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
        problems = []
        if len(self.offsets) != len(self.sizes):
            problems.append(
                Problem(
                    "shape-mismatch",
                    found=f"{len(self.offsets)} offsets and {len(self.sizes)} sizes",
                    hint="give one offset and one size for each dim",
                )
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            problems.append(Problem("box-out-of-range", found=f"{self!r}", hint="offsets and sizes are at least 0"))
        raise_problems(problems)

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
        """Return the index of this box in the global tensor: ``tensor[box.slices()]``."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if they share no element."""
        if self.ndim != other.ndim:
            raise PlanError(
                Problem(
                    "shape-mismatch",
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
            if length <= 0:  # disjoint in one dim
                return None
            offsets.append(start)
            sizes.append(length)
        return _box(tuple(offsets), tuple(sizes))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Build a box from valid values, without the checks, which cost more than the box."""
    box = object.__new__(Box)
    object.__setattr__(box, "offsets", offsets)
    object.__setattr__(box, "sizes", sizes)
    return box


def grid(intervals: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """Return the boxes of a grid, row-major: one for each combination of each dim's intervals, without empty ones."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for along in intervals:
        if len(along) == 1:  # the usual case, without a product
            offset, size = along[0]
            if size == 0:
                return ()
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes]
        else:
            boxes = [((*offsets, offset), (*sizes, size)) for offsets, sizes in boxes for offset, size in along if size]
    return tuple(_box(offsets, sizes) for offsets, sizes in boxes)
