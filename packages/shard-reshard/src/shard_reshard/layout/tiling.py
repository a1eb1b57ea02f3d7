"""Tiling: every hole and overlap of boxes that should tile a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from shard_spec import Box

from shard_reshard._shared.problems import Problem

_SHOWN = 4  # holes, and overlaps, that an error names; it counts the rest

Span = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dim


def coverage_problems(shape: tuple[int, ...], boxes: Mapping[int, Sequence[Box]]) -> list[Problem]:
    """Everything that keeps ``boxes`` (by rank) from tiling a tensor of ``shape``.

    The same box on several ranks is one box with replicas. Empty boxes are allowed anywhere inside the shape.
    """
    problems = [
        Problem("invalid-argument", found=f"rank {rank}", hint="ranks are counted from 0") for rank in boxes if rank < 0
    ]
    owners: dict[Span, list[int]] = {}
    for rank, found in boxes.items():
        for box in found:
            if box.ndim != len(shape) or any(end > size for end, size in zip(box.ends, shape, strict=True)):
                hint = f"boxes lie inside the global shape {shape}"
                problems.append(Problem("box-out-of-range", found=f"rank {rank} lists {box!r}", hint=hint))
            elif box.numel:
                ranks = owners.setdefault((box.offsets, box.ends), [])
                if rank in ranks:
                    hint = "list a box once on a rank"
                    problems.append(Problem("boxes-overlap", found=f"rank {rank} lists {box!r} twice", hint=hint))
                ranks.append(rank)
    if problems:
        return problems
    spans = sorted(owners)
    overlaps = _overlaps(spans)
    problems = [
        Problem(
            "boxes-overlap",
            found=f"{_box(one)!r} of rank {owners[one][0]} and {_box(other)!r} of rank {owners[other][0]}",
            hint="each element has one place on a rank; only equal boxes may be replicated",
        )
        for one, other in overlaps[:_SHOWN]
    ]
    if len(overlaps) > _SHOWN:
        problems.append(Problem("boxes-overlap", found=f"{len(overlaps) - _SHOWN} more overlaps"))
    covered = sum(prod(b - a for a, b in zip(*span, strict=True)) for span in spans)
    if overlaps or covered != prod(shape):
        holes = _holes(((0,) * len(shape), shape), spans) if prod(shape) else []
        for hole in holes[:_SHOWN]:
            problems.append(
                Problem("boxes-incomplete", found=f"no rank has {_box(hole)!r}", hint="add the missing box")
            )
        if len(holes) > _SHOWN:
            problems.append(Problem("boxes-incomplete", found=f"{len(holes) - _SHOWN} more holes"))
    return problems


def _box(span: Span) -> Box:
    start, stop = span
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def _overlaps(spans: list[Span]) -> list[tuple[Span, Span]]:
    """Pairs that share an element: a sweep along the dim that tells most boxes apart."""
    if not spans or not spans[0][0]:
        return []
    dim = max(range(len(spans[0][0])), key=lambda d: len({start[d] for start, _ in spans}))
    active: list[Span] = []
    found: list[tuple[Span, Span]] = []
    for span in sorted(spans, key=lambda s: s[0][dim]):
        start, stop = span
        active = [other for other in active if other[1][dim] > start[dim]]
        found.extend(
            (other, span)
            for other in active
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(*other, start, stop, strict=True))
        )
        active.append(span)
    return found


def _holes(whole: Span, spans: list[Span], dim: int = 0) -> list[Span]:
    """Return the rest of ``whole`` beside ``spans``: slab by slab along ``dim``, recursively."""
    start, stop = whole
    if dim == len(start):
        return [] if spans else [whole]
    marks = sorted({start[dim], stop[dim], *(s[0][dim] for s in spans), *(s[1][dim] for s in spans)})
    found: list[Span] = []
    for low, high in pairwise(marks):
        slab = (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :])
        for hole in _holes(slab, [s for s in spans if s[0][dim] <= low and s[1][dim] >= high], dim + 1):
            if found and _joins(found[-1], hole, dim):
                found[-1] = found[-1][0], hole[1]
            else:
                found.append(hole)
    return found


def _joins(one: Span, other: Span, dim: int) -> bool:
    """Return True where ``other`` continues ``one`` along ``dim`` and equals it in other dims."""
    same = all(at == dim or (one[0][at] == other[0][at] and one[1][at] == other[1][at]) for at in range(len(one[0])))
    return same and one[1][dim] == other[0][dim]
