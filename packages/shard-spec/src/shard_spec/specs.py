"""Sharding specs of single tensors. Terms are those of ``torch.distributed._shard``. Torch's own are taken too.

Devices, shards with their boxes, coverage of a tensor by boxes; ShardingSpec: the shards of one tensor and their
devices, chunk and enumerable specs; and Sharder.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout import REPLICATE, Box, Layout, MeshSpec, PlacementSpec, ShardSpec, UnevenShard, chunk

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "ShardMetadata",
    "Sharder",
    "ShardingSpec",
    "RemoteDevice",
    "DeviceLike",
    "TensorShards",
    "from_torch",
    "to_torch",
    "as_spec",
]

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
        vars(self).update(
            shard_offsets=tuple(int(offset) for offset in shard_offsets),
            shard_sizes=tuple(int(size) for size in shard_sizes),
            placement=None if placement is None else RemoteDevice(placement),
        )
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
        vars(self).update(
            shards_metadata=tuple(shards_metadata),
            size=tuple(int(length) for length in size),
            tensor_properties=tensor_properties,
        )


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


class ShardingSpec(abc.ABC):
    """Sharding of one tensor into shards, and the device of each.

    Subclass it for a scheme of your own: ``build_metadata`` is the only method to write. Make the subclass picklable
    and free of state that differs between ranks; every rank calls it alike and has to get the same result.
    """

    @abc.abstractmethod
    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """Return the shards of a tensor of global shape ``tensor_sizes``.

        Args:
            tensor_sizes: Global shape.
            tensor_properties: Passed through to the result.

        Returns:
            The shards; together they hold every element once.
        """

    def shards_for(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """Return the validated shards of a tensor of global ``shape``.

        Raises:
            PlanError: If shards overlap, leave holes, lie outside the tensor or name no rank.
        """
        shards = tuple(self.build_metadata(tuple(shape)).shards_metadata)
        boxes = [shard.box for shard in shards]
        problems = cover_problems(boxes, shape)
        if not any(problem.code == "shape-mismatch" for problem in problems):
            problems += overlap_problems(boxes)  # needs boxes of one number of dims
        problems += [
            Problem(
                "invalid-layout",
                "placements",
                found=f"{shard.placement}",
                hint="name the rank that holds the shard, as in 'rank:0/cuda:0'",
            )
            for shard in shards
            if shard.rank is None
        ]
        raise_problems(problems, f"{type(self).__name__} does not fit a tensor of shape {tuple(shape)}")
        return shards

    def boxes(self, shape: Sequence[int]) -> dict[int, tuple[Box, ...]]:
        """Return the boxes of every global rank of the spec, in its order."""
        held: dict[int, tuple[Box, ...]] = {}
        for shard in self.shards_for(shape):
            assert shard.rank is not None
            held[shard.rank] = (*held.get(shard.rank, ()), shard.box)
        return held

    def to_layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of ``shape``: ranks on a mesh, and placements.

        Raises:
            PlanError: ``not-a-grid`` or ``invalid-layout`` if no mesh can express it.
        """
        shape = tuple(shape)
        held = box_of_each_rank(self, shape)
        grid = grid_of(list(held.values()), shape)  # a mesh is a grid
        if grid is None:
            raise PlanError(
                Problem(
                    "not-a-grid",
                    "shards",
                    found=(
                        f"{len(held)} shards of a tensor of shape {shape} are not the cells of one "
                        "grid of rows and columns"
                    ),
                    hint=(
                        "split each dim at the same places everywhere; shard-reshard moves free boxes, a mesh does not"
                    ),
                )
            )
        ranks, (cuts, order) = tuple(held), grid  # order: row-major cells
        cut_dims = [dim for dim, intervals in enumerate(cuts) if len(intervals) > 1]
        if not cut_dims:  # one shard
            return Layout(MeshSpec({"shard0": 1}, ranks), [ShardSpec(0) if shape else REPLICATE])  # one rank holds all
        # One mesh axis for each sharded dim, ranks in the order of their shards.
        axes = {f"shard{dim}": len(cuts[dim]) for dim in cut_dims}
        placements: list[PlacementSpec] = []
        for dim in cut_dims:
            sizes = tuple(size for _, size in cuts[dim])
            plain = tuple(chunk(shape[dim], len(sizes), at)[1] for at in range(len(sizes)))  # sizes of torch.chunk
            placements.append(ShardSpec(dim) if sizes == plain else UnevenShard(dim, sizes))
        return Layout(MeshSpec(axes, [ranks[at] for at in order]), placements)


def box_of_each_rank(spec: ShardingSpec, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the one box of each rank of the spec, in its order."""
    held = spec.boxes(shape)
    crowded = [rank for rank, boxes in held.items() if len(boxes) > 1]
    if crowded:
        raise PlanError(
            Problem(
                "invalid-layout",
                "placements",
                found=f"ranks {', '.join(map(str, crowded))} hold more than one shard",
                hint="name each rank once",
            )
        )
    return {rank: box for rank, (box,) in held.items()}


@dataclass(frozen=True, init=False)
class ChunkShardingSpec(ShardingSpec):
    """Shard ``dim`` into one chunk for each device; chunk ``i`` lies on ``placements[i]``.

    All chunks but the last have length ``ceil(length / count)``, as in ``torch.chunk``: 9 rows on 8 devices are
    2, 2, 2, 2, 1, 0, 0, 0 at offsets 0, 2, 4, 6, 8, 9, 9, 9.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        placements: Devices (not DTensor placements), for example ``["rank:0/cuda:0", "rank:1/cuda:1"]``, in the
            order of the chunks. Torch's remote devices are accepted. The sequence is copied.

    Raises:
        PlanError: ``invalid-layout`` or ``missing-argument``, all of them at once.
    """

    dim: int
    placements: tuple[RemoteDevice, ...]

    def __init__(self, dim: int, placements: Sequence[DeviceLike]) -> None:
        problems: list[Problem] = []
        if isinstance(dim, bool) or not isinstance(dim, int):
            problems.append(Problem("invalid-layout", "dim", found=repr(dim), hint="a dim is an integer"))
        if isinstance(placements, str):
            placements = [placements]  # not one device per letter
        devices = []
        for placement in placements:
            try:
                devices.append(RemoteDevice(placement))
            except PlanError as error:
                problems.extend(error.problems)
        if not problems and not devices:
            problems.append(
                Problem(
                    "missing-argument",
                    "placements",
                    found="an empty list",
                    hint="name at least one device, as in ['rank:0/cpu']",
                )
            )
        raise_problems(problems)
        vars(self).update(
            dim=dim,
            placements=tuple(devices),
        )

    def normalized(self, ndim: int) -> ChunkShardingSpec:
        """Return an equal spec with a dim from 0 to ``ndim - 1``.

        Raises:
            PlanError: ``dim-out-of-range`` if a tensor of ``ndim`` dims has no such dim.
        """
        if not -ndim <= self.dim < ndim:
            raise PlanError(
                Problem(
                    "dim-out-of-range",
                    "dim",
                    dim=self.dim,
                    found=f"dim {self.dim} of a tensor of {ndim} dims",
                    hint=f"use -{ndim} to {ndim - 1}" if ndim else "a tensor without dims cannot be sharded",
                )
            )
        return ChunkShardingSpec(self.dim % ndim, self.placements)

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """See ``ShardingSpec.build_metadata``; offsets never exceed the tensor."""
        shape = tuple(tensor_sizes)
        dim = self.normalized(len(shape)).dim
        shards = []
        for index, device in enumerate(self.placements):
            start, length = chunk(shape[dim], len(self.placements), index)
            offsets = tuple(start if at == dim else 0 for at in range(len(shape)))
            shards.append(ShardMetadata(offsets, (*shape[:dim], length, *shape[dim + 1 :]), device))
        return TensorShards(shards, shape, tensor_properties)

    def to_layout(self, shape: Sequence[int]) -> Layout:
        """See ``ShardingSpec.to_layout``; permuted devices give a permuted mesh."""
        shape = tuple(shape)
        dim, ranks = self.normalized(len(shape)).dim, tuple(box_of_each_rank(self, shape))
        return Layout(MeshSpec({f"shard{dim}": len(ranks)}, ranks), [ShardSpec(dim)])


@dataclass(frozen=True, init=False)
class EnumerableShardingSpec(ShardingSpec):
    """A tensor with arbitrary shards: one ``ShardMetadata`` for each.

    Args:
        shards: The shards. No two may share an element. Torch's shard metadata is accepted.
            The sequence is copied.

    Raises:
        PlanError: ``boxes-incomplete``, ``shape-mismatch`` or ``boxes-overlap``.
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Sequence[ShardMetadata | Any]) -> None:
        object.__setattr__(self, "shards", tuple(as_shard(shard) for shard in shards))
        ndims = sorted({len(shard.shard_sizes) for shard in self.shards})
        if not ndims:
            raise PlanError(
                Problem("boxes-incomplete", "shards", found="an empty list", hint="give at least one ShardMetadata")
            )
        if len(ndims) > 1:
            raise PlanError(
                Problem(
                    "shape-mismatch",
                    "shards",
                    found=f"shards of {ndims} dims",
                    hint="all shards are shards of one tensor",
                )
            )
        raise_problems(overlap_problems([shard.box for shard in self.shards], "shards"))  # holes show with a shape

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """See ``ShardingSpec.build_metadata``; raises ``PlanError`` if the shards do not tile ``tensor_sizes``."""
        raise_problems(cover_problems([shard.box for shard in self.shards], tensor_sizes, "shards"))
        return TensorShards(self.shards, tensor_sizes, tensor_properties)


def as_shard(given: object) -> ShardMetadata:
    """Convert a shard's metadata, ours or torch's, to ours."""
    if isinstance(given, ShardMetadata):
        return given
    if all(hasattr(given, name) for name in ("shard_offsets", "shard_sizes", "placement")):
        torch_shard: Any = given
        return ShardMetadata(torch_shard.shard_offsets, torch_shard.shard_sizes, torch_shard.placement)
    raise PlanError(
        Problem(
            "wrong-type",
            "shards",
            found=f"{given!r} of type {type(given).__qualname__}",
            hint="give ShardMetadata(shard_offsets, shard_sizes, placement)",
        )
    )


# ---- torch's own spec objects, which are accepted like ours ----------------------------------------------------------


def from_torch(value: object) -> Any:
    """Convert an object of ``torch.distributed._shard`` to ours.

    Args:
        value: A chunk or enumerable sharding spec, a shard metadata, or a remote device of torch.

    Returns:
        The equivalent object of this package.

    Raises:
        PlanError: ``wrong-type`` for anything else, a subclass of torch's ``ShardingSpec`` of one's own included.
    """
    kind = _torch_compat.shard_kind(value)  # None before torch's module is imported
    spec: Any = value
    if kind == "chunk":
        return ChunkShardingSpec(spec.dim, spec.placements)
    if kind == "enumerable":
        return EnumerableShardingSpec(spec.shards)
    if kind == "shard":
        return as_shard(spec)
    if kind == "device":
        return RemoteDevice(spec)
    raise PlanError(unknown_spec("", value))


def to_torch(value: ShardingSpec | ShardMetadata | RemoteDevice, shape: Sequence[int] | None = None) -> Any:
    """Convert one of our objects to torch's.

    Args:
        value: A spec, a shard or a device.
        shape: Global shape; needed for a ``ShardingSpec`` subclass of your own, which becomes an enumerable spec.

    Raises:
        PlanError: ``missing-argument`` if it is needed and missing, ``wrong-type`` for other objects.
    """
    if isinstance(value, RemoteDevice):
        return _torch_compat.torch_class("device")(str(value))
    if isinstance(value, ShardMetadata):
        placement = None if value.placement is None else to_torch(value.placement)
        return _torch_compat.torch_class("shard")(list(value.shard_offsets), list(value.shard_sizes), placement)
    if isinstance(value, ChunkShardingSpec):
        return _torch_compat.torch_class("chunk")(value.dim, [to_torch(device) for device in value.placements])
    if isinstance(value, EnumerableShardingSpec):
        return _torch_compat.torch_class("enumerable")([to_torch(shard) for shard in value.shards])
    if isinstance(value, ShardingSpec):
        if shape is None:
            raise PlanError(
                Problem(
                    "missing-argument",
                    "shape",
                    found=f"a {type(value).__qualname__}, which torch does not know",
                    hint="pass shape=, the global shape",
                )
            )
        return to_torch(EnumerableShardingSpec(value.shards_for(shape)))  # torch has no subclass of ours
    raise PlanError(unknown_spec("", value))


def as_spec(value: object) -> ShardingSpec | None:
    """Convert a spec, ours or torch's, to one of ours; None for other values."""
    if isinstance(value, ShardingSpec):
        return value
    if _torch_compat.shard_kind(value) in ("chunk", "enumerable"):
        return from_torch(value)  # type: ignore[no-any-return]  # from_torch returns any of our classes
    return None


def unknown_spec(name: str, value: object) -> Problem:
    """Return the problem of an object that is no spec."""
    return Problem(
        "wrong-type",
        name,
        found=f"{value!r} of type {type(value).__qualname__}",
        hint="use ChunkShardingSpec, EnumerableShardingSpec, a subclass of shard_spec.ShardingSpec, or a Sharder",
    )
