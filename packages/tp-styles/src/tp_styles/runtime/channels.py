"""Where the channels are that are divided over the ranks, through what a forward does to an activation. Pure.

Shapes in, shapes out: no tensors. An operation that is not known here ends the tracking, so that nothing is said that
is not certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Channels:
    """One dim of an activation of which this rank holds a part.

    Attributes:
        name: FQN of the layer that gave it.
        dim: The dim, from the front.
        size: This rank's channels, or groups of them.
        cuts: Places between sections: a cut there gives this rank's part of each section.
        inside: A row-wise layer takes them in. Channels that leave the model (logits) may be meant for code that
            finds a greatest one or a sum on each rank, and communicates.
    """

    name: str
    dim: int
    size: int
    cuts: tuple[int, ...] = ()
    inside: bool = True

    def at(self, dim: int) -> Channels:
        """The same channels in another dim."""
        return Channels(self.name, dim, self.size, self.cuts, self.inside)

    def piece(self, start: int, stop: int) -> Channels | None:
        """Some of the channels; None where the cut is not between sections."""
        if (start != 0 and start not in self.cuts) or (stop != self.size and stop not in self.cuts):
            return None
        within = tuple([cut - start for cut in self.cuts if start < cut < stop])
        return Channels(self.name, self.dim, stop - start, within, self.inside)

    def reshaped(self, old: Shape, new: Shape) -> Channels | None:
        """The channels after a view of the whole tensor.

        The rank's part is a range of the channels, so it stays one in the first of the dims that they become. None
        where they can no longer be told apart from other dims.

        Raises:
            Cut: A group of channels has some of two sections.
        """
        dim = self.dim
        if new[:dim] != old[:dim]:
            found = _after(math.prod(old[:dim]), old, new)
            if found is None:
                return None
            dim = found
        if dim >= len(new) or self.size < 2 or new[dim] < 2 or math.prod(new[dim:]) != math.prod(old[self.dim :]):
            return None
        if new[dim] % self.size == 0:  # dims behind have joined
            factor = new[dim] // self.size
            return Channels(self.name, dim, new[dim], tuple([cut * factor for cut in self.cuts]), self.inside)
        if self.size % new[dim] != 0:
            return None
        group = self.size // new[dim]
        if any(cut % group for cut in self.cuts):
            raise Cut(f"a view of {new[dim]} groups of {group} channels, with sections that end at {self.cuts}")
        return Channels(self.name, dim, new[dim], tuple([cut // group for cut in self.cuts]), self.inside)


class Cut(Exception):
    """What was done to the divided channels that means something else on a part of them than on the whole."""


def _after(count: int, old: Shape, new: Shape) -> int | None:
    """The dim before which `new` has `count` elements; None where dims of size 1 leave a choice."""
    if 1 in old or 1 in new:
        return None
    before = 1
    for dim, size in enumerate(new):
        if before == count:
            return dim
        before *= size
    return None


# ---------------------------------------------------------------------------------------------- cuts along a dim


def split(channels: Channels, ndim: int, dim: int, sizes: Sequence[int]) -> list[Channels]:
    """Pieces of the given sizes along a dim.

    Raises:
        Cut: Along the channels, and not between sections.
    """
    if dim % ndim != channels.dim:
        return [channels for _ in sizes]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_piece(channels, start, start + size))
        start += size
    return pieces


def unbind(channels: Channels, ndim: int, dim: int, count: int) -> list[Channels | None]:
    """Slices of a dim, which is gone.

    Raises:
        Cut: They are single channels, and not sections.
    """
    if dim % ndim != channels.dim:
        return [channels.at(channels.dim - (dim % ndim < channels.dim)) for _ in range(count)]
    for index in range(count):
        _piece(channels, index, index + 1)
    return [None for _ in range(count)]


def index(channels: Channels, shape: Shape, key: Any) -> Channels | None:
    """What `x[key]` gives; tensors and lists in the key end the tracking.

    Raises:
        Cut: It takes some of the channels, and not whole sections.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dims = sum(0 if found is None or found is Ellipsis else 1 for found in keys)
    if Ellipsis not in [found for found in keys if found is None or found is Ellipsis]:
        keys.append(Ellipsis)
    dim, kept = 0, 0  # of x, of the result
    result: Channels | None = None
    for found in keys:
        if found is None:
            kept += 1
        elif found is Ellipsis:
            skipped = len(shape) - dims
            if dim <= channels.dim < dim + skipped:
                result = channels.at(kept + channels.dim - dim)
            dim, kept = dim + skipped, kept + skipped
        elif isinstance(found, bool) or not isinstance(found, int | slice):
            return None
        else:
            if dim == channels.dim:
                result = _one(channels, found, kept)
            dim, kept = dim + 1, kept + (1 if isinstance(found, slice) else 0)
    return result


def _one(channels: Channels, key: int | slice, dim: int) -> Channels | None:
    if isinstance(key, int):
        start = key % channels.size
        _piece(channels, start, start + 1)
        return None
    start, stop, step = key.indices(channels.size)
    if step > 1 and start < step and stop == channels.size and channels.size % step == 0:
        return Channels(channels.name, dim, channels.size // step, (), channels.inside)  # interleaved: a part of each
    if start >= stop:
        return None
    return _piece(channels, start, stop).at(dim)


def _piece(channels: Channels, start: int, stop: int) -> Channels:
    found = channels.piece(start, stop)
    if found is None:
        raise Cut(f"{start}:{stop} of this rank's {channels.size} in dim {channels.dim}")
    return found


# ---------------------------------------------------------------------------------------------- across a dim


def reduced(channels: Channels, ndim: int, dims: Any, *, whole: bool) -> None:
    """An operation along some dims, None for all of them.

    Args:
        channels: The channels.
        ndim: Number of dims.
        dims: A dim or several.
        whole: Whether all dims together count.

    Raises:
        Cut: It goes along the channels, of which others are elsewhere.
    """
    if dims is None:
        if whole:
            raise Cut("over all dims")
        return
    found = [dims] if isinstance(dims, int) else list(dims)
    if channels.dim in [dim % ndim for dim in found]:
        raise Cut(f"along dim {channels.dim}, of which this rank has {channels.size}")
