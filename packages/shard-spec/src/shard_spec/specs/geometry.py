"""Checks that boxes tile a tensor: no overlap, no hole, nothing outside; and that they form a grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from shard_spec._shared.problems import Problem
from shard_spec.layout.boxes import Box


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Sweeps along the dim with the most different offsets."""
    full = [box for box in boxes if box.numel]
    if len(full) < 2:
        return None
    if not full[0].ndim:
        return full[0], full[1]
    dim = max(range(full[0].ndim), key=lambda at: len({box.offsets[at] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda each: each.offsets[dim]):
        active = [other for other in active if other.ends[dim] > box.offsets[dim]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


def overlap_problems(boxes: Sequence[Box], name: str = "") -> list[Problem]:
    """A problem that names two boxes which share elements; empty when none do."""
    pair = overlap(boxes)
    if pair is None:
        return []
    return [
        Problem(
            "boxes-overlap",
            name,
            found=f"{pair[0]!r} and {pair[1]!r} share elements",
            hint="give every element to one shard",
        )
    ]


def cover_problems(boxes: Sequence[Box], shape: Sequence[int], name: str = "") -> list[Problem]:
    """Return why ``boxes`` (without overlaps) do not tile a tensor of ``shape``."""
    shape = tuple(shape)
    if any(box.ndim != len(shape) for box in boxes):
        found = sorted({box.ndim for box in boxes})
        return [
            Problem(
                "shape-mismatch",
                name,
                found=f"shards of {found} dims for a tensor of shape {shape}",
                hint=f"give {len(shape)} offsets and sizes",
            )
        ]
    outside = [box for box in boxes if any(end > length for end, length in zip(box.ends, shape, strict=True))]
    problems = [
        Problem("box-out-of-range", name, found=f"{box!r} of a tensor of shape {shape}", hint="stay inside the tensor")
        for box in outside
    ]
    covered = sum(box.numel for box in boxes)
    if not outside and covered < prod(shape):
        problems.append(
            Problem(
                "boxes-incomplete",
                name,
                found=f"the shards hold {covered} of {prod(shape)} elements of shape {shape}",
                hint="give every element to one shard",
            )
        )
    return problems


Interval = tuple[int, int]


def grid_of(
    boxes: Sequence[Box], shape: Sequence[int]
) -> tuple[tuple[tuple[Interval, ...], ...], tuple[int, ...]] | None:
    """The grid whose cells ``boxes`` are, or None when they are none.

    Returns:
        For each dim its ``(offset, size)`` intervals in ascending order (one where nobody cuts it), and the positions
        of the boxes in row-major order of their cells. Empty boxes at the end of a dim are cells too, also several of
        them when only one dim is cut, so that a rank without elements keeps its place.
    """
    cells = [tuple(zip(box.offsets, box.sizes, strict=True)) for box in boxes]
    ndim = len(tuple(shape))
    order = tuple(sorted(range(len(boxes)), key=lambda at: cells[at]))
    intervals = [tuple(sorted({cell[dim] for cell in cells})) for dim in range(ndim)]
    varying = [dim for dim in range(ndim) if len(intervals[dim]) > 1]
    if len(varying) == 1:
        intervals[varying[0]] = tuple(cells[at][varying[0]] for at in order)
    elif len(set(cells)) < len(cells) or len(cells) != prod(map(len, intervals)):
        return None
    for found, length in zip(intervals, shape, strict=True):
        if (
            found[0][0] != 0
            or sum(found[-1]) != length
            or any(sum(left) != right[0] for left, right in pairwise(found))
        ):
            return None
    assert set(cells) == set(product(*intervals))  # as many different cells as the grid has, each made of its intervals
    return tuple(intervals), order
