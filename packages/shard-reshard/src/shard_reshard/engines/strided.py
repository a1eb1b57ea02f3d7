"""Strided copies as boxes of dense tensors: the part of a recording that is pure.

A loader's copy is two strided views. A checkpoint tensor is dense, so what a view reads of it is a few boxes, each with
a strided place in the model's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from shard_reshard.layout.shard_map import Index
from shard_reshard.lowering import dense_strides


class StridedCopy(NamedTuple):
    """Elements of one memory and of another, index by index."""

    dims: tuple[tuple[int, int, int], ...]  # size, stride in the source, stride in the target
    source: int  # offsets of the first element
    target: int

    @classmethod
    def of(cls, source: torch.Tensor, target: torch.Tensor, shift: int = 0) -> StridedCopy:
        """Return the copy of one view into another of its shape. ``shift`` is added to the target's offset."""
        dims = zip(source.shape, source.stride(), target.stride(), strict=True)
        return cls(tuple(dims), int(source.storage_offset()), int(target.storage_offset()) + shift)


class Landing(NamedTuple):
    """A box of a dense tensor and its strided destination view. Strides of dims of size 1 are 0."""

    start: Index
    sizes: Index
    strides: Index
    offset: int


def landings(copy: StridedCopy, shape: Index) -> Iterator[Landing]:
    """Yield the boxes of a dense source of ``shape`` that a copy reads."""
    dims = [dim for dim in copy.dims if dim[0] != 1]
    if any(size == 0 for size, _, _ in dims):
        return
    merged = True
    while merged:  # joins dims that form one dim on both sides
        merged = False
        for outer in dims:
            inner = next((d for d in dims if d is not outer and outer[1:] == (d[0] * d[1], d[0] * d[2])), None)
            if inner is not None:
                dims = [d for d in dims if d is not outer and d is not inner]
                dims.append((outer[0] * inner[0], *inner[1:]))
                merged = True
                break
    yield from _boxes(dims, copy.source, copy.target, shape, dense_strides(shape))


def _boxes(
    dims: list[tuple[int, int, int]], source: int, target: int, shape: Index, strides: Index
) -> Iterator[Landing]:
    start = tuple(source // stride % size for size, stride in zip(shape, strides, strict=True))
    sizes, places = [1] * len(shape), [0] * len(shape)
    for number, (size, step, to) in enumerate(dims):
        if size == 1:
            continue
        rest = dims[:number] + dims[number + 1 :]
        at = next((d for d in range(len(shape)) if shape[d] > 1 and strides[d] == step), None)
        if at is None or sizes[at] > 1:  # skips or repeats elements: one index at a time
            for index in range(size):
                yield from _boxes(rest, source + index * step, target + index * to, shape, strides)
            return
        room = shape[at] - start[at]
        if size > room:  # continues in the next dim
            first = room if start[at] else size // room * room
            rows = first // room
            head = [*rest, (rows, step * room, to * room), (room, step, to)] if rows > 1 else [*rest, (room, step, to)]
            yield from _boxes(head, source, target, shape, strides)
            if size > first:
                tail = [*rest, (size - first, step, to)]
                yield from _boxes(tail, source + first * step, target + first * to, shape, strides)
            return
        sizes[at], places[at] = size, to
    yield Landing(start, tuple(sizes), tuple(places), target)


def cut(landing: Landing, dim: int, low: int, high: int) -> Landing:
    """Return the part of a landing whose indices along ``dim`` are from ``low`` to ``high``."""
    offset = landing.offset + (low - landing.start[dim]) * landing.strides[dim]
    start, sizes = _with(landing.start, dim, low), _with(landing.sizes, dim, high - low)
    return landing._replace(start=start, sizes=sizes, offset=offset)


def divide(landing: Landing, box: Landing) -> tuple[Landing | None, list[Landing]]:
    """Return the part of a landing inside of another one's box, and those outside."""
    bounds = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*landing[:2], *box[:2], strict=True)]
    if any(low >= high for low, high in bounds):
        return None, [landing]
    outside = []
    for dim, (low, high) in enumerate(bounds):
        end = landing.start[dim] + landing.sizes[dim]
        if landing.start[dim] < low:
            outside.append(cut(landing, dim, landing.start[dim], low))
        if high < end:
            outside.append(cut(landing, dim, high, end))
        landing = cut(landing, dim, low, high)
    return landing, outside


def visible(landing: Landing, hidden: torch.Tensor) -> Iterator[Landing]:
    """Yield the parts of a landing whose elements, in its shape, are not ``hidden``."""
    if not bool(hidden.any()):
        yield landing
        return
    for dim in range(hidden.dim()):
        slabs = hidden.movedim(dim, 0).flatten(1) if hidden.dim() > 1 else hidden[:, None]
        marks = (slabs[1:] != slabs[:-1]).any(1).nonzero().view(-1).add(1).tolist()
        if marks:  # else all indices along the dim are alike
            for low, high in pairwise([0, *marks, len(slabs)]):
                part = cut(landing, dim, landing.start[dim] + low, landing.start[dim] + high)
                yield from visible(part, hidden.narrow(dim, low, high - low))
            return


def merge_landings(found: Sequence[Landing]) -> list[Landing]:
    """Merge neighbouring landings that form one box in one view."""
    merged = list(found)
    for dim in reversed(range(len(merged[0].sizes) if merged else 0)):
        merged.sort(key=lambda entry: (_without(entry.start, dim), entry.start[dim]))
        joined: list[Landing] = []
        for entry in merged:
            one = joined[-1] if joined else None
            # Of the same box and strides in all other dims.
            if one and all(_without(a, dim) == _without(b, dim) for a, b in zip(one[:3], entry[:3], strict=True)):
                step, rest = divmod(entry.offset - one.offset, one.sizes[dim])
                strides = {part.strides[dim] for part in (one, entry) if part.sizes[dim] > 1} | {step}
                if one.start[dim] + one.sizes[dim] == entry.start[dim] and not rest and strides == {step} and step > 0:
                    sizes = _with(one.sizes, dim, one.sizes[dim] + entry.sizes[dim])
                    joined[-1] = one._replace(sizes=sizes, strides=_with(one.strides, dim, step))
                    continue
            joined.append(entry)
        merged = joined
    return merged


def _without(index: Index, dim: int) -> Index:
    return index[:dim] + index[dim + 1 :]


def _with(index: Index, dim: int, value: int) -> Index:
    return (*index[:dim], value, *index[dim + 1 :])
