"""Devices, shards with their boxes, coverage of a tensor by boxes; and Sharder."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.intervals import Box

if TYPE_CHECKING:
    from torch import nn


_TorchRemoteDevice: Any = _torch_compat.torch_class("device")


class RemoteDevice(_TorchRemoteDevice):  # type: ignore[misc]  # torch's class is private and untyped
    """Device of one rank: torch's own remote device, with errors as ``PlanError``.

    Written ``"rank:<global rank>/<device>"``, ``"<worker>/<device>"`` or ``"<device>"``; the device may be left out
    after a rank or a worker and is then ``cpu``. Ranks are ranks of the default group, as in torch.

    Args:
        remote_device: The text, a ``torch.device``, another ``RemoteDevice``, or torch's own remote device.

    Raises:
        PlanError: ``invalid-layout`` for anything else.
    """

    def __init__(self, remote_device: DeviceLike) -> None:
        remote = isinstance(remote_device, _TorchRemoteDevice)
        try:
            super().__init__(str(remote_device) if remote else remote_device)
        except (ValueError, TypeError, RuntimeError):  # the last from torch.device
            raise PlanError(
                Problem(
                    "invalid-layout",
                    found=repr(remote_device),
                    hint="write 'rank:0/cuda:0', 'rank:0', 'worker/cpu' or 'cuda:0', or give a torch.device",
                )
            ) from None

    def __str__(self) -> str:
        return str(super().__repr__())

    def __repr__(self) -> str:
        return f"RemoteDevice({str(self)!r})"


DeviceLike: TypeAlias = "str | torch.device | RemoteDevice | Any"  # Any: torch's own remote device


@dataclass(frozen=True, init=False)
class ShardMetadata:
    """Offset, size and device of one shard of the global tensor.

    Args:
        shard_offsets: First index in each dim of the global tensor.
        shard_sizes: Number of indices in each dim; 0 is an empty shard.
        placement: Its device, for example ``"rank:0/cuda:0"``; None if unknown.

    Raises:
        PlanError: ``shape-mismatch``, ``box-out-of-range`` or ``invalid-layout``.
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: RemoteDevice | None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: DeviceLike | None = None
    ) -> None:
        # Copies: later changes of the caller's lists change no shard (and no hash).
        object.__setattr__(self, "shard_offsets", tuple(int(offset) for offset in shard_offsets))
        object.__setattr__(self, "shard_sizes", tuple(int(size) for size in shard_sizes))
        object.__setattr__(self, "placement", None if placement is None else RemoteDevice(placement))
        Box(self.shard_offsets, self.shard_sizes)  # raises if they are invalid

    @property
    def rank(self) -> int | None:
        """Global rank of the shard, or None if the placement does not name one."""
        return None if self.placement is None else self.placement.rank()

    @property
    def box(self) -> Box:
        """Box of the global tensor, without the device."""
        return Box(self.shard_offsets, self.shard_sizes)


@dataclass(frozen=True, init=False)
class TensorShards:
    """All shards of one tensor: the result of ``ShardingSpec.build_metadata``.

    Attributes:
        shards_metadata: The shards, in the order of the spec.
        size: Global shape.
        tensor_properties: Argument of ``build_metadata``, unchanged.
    """

    shards_metadata: tuple[ShardMetadata, ...]
    size: tuple[int, ...]
    tensor_properties: object

    def __init__(
        self, shards_metadata: Sequence[ShardMetadata], size: Sequence[int], tensor_properties: object = None
    ) -> None:
        object.__setattr__(self, "shards_metadata", tuple(shards_metadata))
        object.__setattr__(self, "size", tuple(int(length) for length in size))
        object.__setattr__(self, "tensor_properties", tensor_properties)


def overlap_problems(boxes: Sequence[Box], name: str = "") -> list[Problem]:
    """Report two boxes with shared elements; empty if there are none."""
    full = [box for box in boxes if box.numel]  # empty boxes overlap nothing
    # Sweep along the dim with the most different offsets; boxes without dims are one element each.
    dim = max(range(full[0].ndim if full else 0), key=lambda at: len({box.offsets[at] for box in full}), default=None)
    active: list[Box] = []
    for box in full if dim is None else sorted(full, key=lambda each: each.offsets[dim]):
        active = [other for other in active if dim is None or other.ends[dim] > box.offsets[dim]]
        for other in active:
            if other.intersect(box) is not None:
                return [
                    Problem(
                        "boxes-overlap",
                        name,
                        found=f"{other!r} and {box!r} share elements",
                        hint="give every element to one shard",
                    )
                ]
        active.append(box)
    return []


def cover_problems(boxes: Sequence[Box], shape: Sequence[int], name: str = "") -> list[Problem]:
    """Return the reasons that ``boxes`` (without overlaps) do not tile a tensor of ``shape``."""
    shape = tuple(shape)
    if any(box.ndim != len(shape) for box in boxes):  # later checks zip the dims
        return [
            Problem(
                "shape-mismatch",
                name,
                found=f"shards of {sorted({box.ndim for box in boxes})} dims for a tensor of shape {shape}",
                hint=f"give {len(shape)} offsets and sizes",
            )
        ]
    outside = [box for box in boxes if any(end > length for end, length in zip(box.ends, shape, strict=True))]
    problems = [
        Problem("box-out-of-range", name, found=f"{box!r} of a tensor of shape {shape}", hint="stay inside the tensor")
        for box in outside
    ]
    covered = sum(box.numel for box in boxes)  # without overlaps a sum suffices
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
    """Return the grid with ``boxes`` as its cells, or None.

    Returns:
        For each dim its ``(offset, size)`` intervals in ascending order (one if it is not sharded), and the positions
        of the boxes in row-major order of their cells. Empty boxes at the end of a dim are cells too, even several of
        them if only one dim is sharded, so that an empty rank has a place.
    """
    cells = [tuple(zip(box.offsets, box.sizes, strict=True)) for box in boxes]
    ndim = len(tuple(shape))
    order = tuple(sorted(range(len(boxes)), key=lambda at: cells[at]))  # offsets ascending: row-major
    intervals = [tuple(sorted({cell[dim] for cell in cells})) for dim in range(ndim)]
    varying = [dim for dim in range(ndim) if len(intervals[dim]) > 1]
    if len(varying) == 1:  # empty boxes may repeat
        intervals[varying[0]] = tuple(cells[at][varying[0]] for at in order)
    elif len(set(cells)) < len(cells) or len(cells) != prod(map(len, intervals)):
        return None
    for starts, length in zip(intervals, shape, strict=True):
        if (
            starts[0][0] != 0
            or sum(starts[-1]) != length
            or any(sum(left) != right[0] for left, right in pairwise(starts))
        ):
            return None
    assert set(cells) == set(product(*intervals))  # as many distinct cells as the grid, each made of its intervals
    return tuple(intervals), order


class Sharder(abc.ABC):
    """Sharding of a full module by its own code.

    In a plan its key is the FQN of a submodule. ``shard_module`` calls ``shard`` on every rank, in the order of the
    FQNs, and puts the returned module in place of the submodule.
    """

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the sharded version of ``module``: a new module, or ``module`` itself, changed.

        May communicate; every rank calls it.
        """
