"""Resolve layouts given by users, or declared by tensors, to shard maps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from shard_spec import Box, Layout, MeshSpec

from shard_reshard._shared.problems import PlanError, Problem, raise_problems, refusal
from shard_reshard.layout.boxes import BoxShardMap, FusedShardMap
from shard_reshard.layout.shard_map import MeshShardMap, ShardMap, sizes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shard_reshard._shared.sharding_info import ShardingInfo
    from shard_reshard.group import GroupInfo


LayoutLike: TypeAlias = Any
"""What says where a tensor lies: a shard-spec `Layout`, a sharding spec of shard-spec or torch, a DTensor, a pair of
DeviceMesh and placements, boxes by rank, or text such as ``"2x4: S(1), R"`` and ``"rank 0"``."""

ToGroup = Callable[[int], int]

# A mesh and a layout in shard-spec's text forms, and the mesh's ranks of the group.
_TEXT = re.compile(r"(?P<mesh>[^:]*):(?P<layout>.*?)(?:\s+on\s+ranks?\s+(?P<ranks>[\d,.\s]+))?\s*", re.DOTALL)
_WHOLE = re.compile(r"\s*(?:whole\s+on\s+)?rank\s+(\d+)\s*")
_TEXT_HINT = "write for example '8: S(0)', '2x4: S(1), R', 'dp=2, tp=4: tp:S(0)', '4: S(0) on ranks 4..7', 'rank 0'"


def resolve_layout(layout: LayoutLike, shape: Sequence[int] | None, to_group: ToGroup | None = None) -> ShardMap:
    """Return the shard map of ``layout`` for a tensor of ``shape``.

    ``shape`` is None if the layout itself has one. ``to_group`` maps a global rank to a rank of the group: layouts,
    boxes and texts use ranks of the group, DeviceMeshes and sharding specs global ones. None: the default group.
    """
    if isinstance(layout, str):  # the first question: of all kinds it comes most often
        return _from_text(layout, sizes_of(shape, "a layout as text"))
    turn = to_group or (lambda rank: rank)
    if isinstance(layout, ShardMap):
        return _same_shape(layout, shape)
    if isinstance(layout, Layout):
        return MeshShardMap(layout, sizes_of(shape, "a Layout"))
    if isinstance(layout, Mapping):
        boxes = {rank: (own,) if isinstance(own, Box) else own for rank, own in layout.items()}
        for rank, own in boxes.items():
            if not isinstance(own, Sequence) or not all(isinstance(box, Box) for box in own):
                raise refusal(
                    "invalid-layout",
                    found=f"{own!r} for rank {rank!r}",
                    hint="give boxes by rank: {rank: Box(offsets, sizes)}, or a list of them",
                )
        return BoxShardMap(_extent([b for held in boxes.values() for b in held]) if shape is None else shape, boxes)
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(layout, tensors.DTensor):
        own = layout.device_mesh, layout.placements
        return _same_shape(resolve_layout(own, layout.shape, to_group), shape)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    pair = isinstance(layout, tuple) and len(layout) == 2
    if pair and meshes is not None and isinstance(layout[0], meshes.DeviceMesh):
        if not isinstance(layout[1], Sequence):
            raise refusal(
                "invalid-layout",
                found=f"(mesh, {layout[1]!r})",
                hint="give placements as a list, one for each axis: (mesh, [Shard(0)])",
            )
        mesh = mesh_spec(layout[0])  # global ranks, in mesh order
        mesh = MeshSpec(mesh.axes, [turn(rank) for rank in mesh.ranks])
        return MeshShardMap(Layout(mesh, tuple(layout[1])), sizes_of(shape, "a mesh with placements"))
    from shard_spec.specs import EnumerableShardingSpec, as_spec  # needs torch; the command line plans without

    if (spec := as_spec(layout)) is None:  # torch's specs too
        raise refusal(
            "invalid-layout",
            found=f"{layout!r} of type {type(layout).__qualname__}",
            hint="give a Layout, a sharding spec, (device_mesh, placements), a DTensor, boxes by rank or a text",
        )
    if shape is None and isinstance(spec, EnumerableShardingSpec):
        shape = _extent([shard.box for shard in spec.shards])
    shape = sizes_of(shape, f"a {type(spec).__name__}")
    return BoxShardMap(shape, {turn(rank): held for rank, held in spec.boxes(shape).items()})


@lru_cache(maxsize=4096)  # a model has few texts and sizes, and many tensors
def _from_text(text: str, shape: tuple[int, ...]) -> ShardMap:
    if (match := _WHOLE.fullmatch(text)) is not None:
        return BoxShardMap.whole(shape, int(match[1]))
    if (match := _TEXT.fullmatch(text)) is None:
        raise refusal("invalid-layout", found=repr(text), hint=_TEXT_HINT)
    spec = MeshSpec.parse(match["mesh"])
    ranks: list[int] = []
    for item in match["ranks"].split(",") if match["ranks"] is not None else ():
        if (span := re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", item)) is None:
            raise refusal("invalid-layout", found=repr(text), hint=_TEXT_HINT)
        listed = range(int(span[1]), int(span[2] or span[1]) + 1)
        if len(ranks) + len(listed) > len(spec.ranks):  # before the list grows
            raise refusal(
                "invalid-layout",
                found=f"{text!r} lists more ranks than its mesh of {len(spec.ranks)} has",
                hint=_TEXT_HINT,
            )
        ranks.extend(listed)
    if match["ranks"] is not None:
        spec = MeshSpec(spec.axes, ranks)
    return MeshShardMap(Layout.parse(match["layout"], spec), shape)


def layout_value(layout: Any) -> Any:
    """Return a layout as a comparable value for caches. None for one that may reference tensors."""
    if type(layout) is tuple and len(layout) == 2 and isinstance(layout[1], list | tuple):
        from shard_reshard._torch_compat import mesh_groups

        return layout[0], tuple(layout[1]), mesh_groups(layout[0])  # the same mesh may get new groups
    return layout if type(layout) is str or isinstance(layout, Layout | ShardMap) else None


def _same_shape(bound: ShardMap, shape: Sequence[int] | None) -> ShardMap:
    if shape is not None and tuple(shape) != bound.shape:
        raise refusal(
            "shape-mismatch",
            "shape",
            found=f"shape={tuple(shape)}, the layout is of a tensor of {bound.shape}",
            hint="leave shape= out, or correct it",
        )
    return bound


def _extent(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the smallest shape that contains all boxes."""
    if not boxes:
        raise refusal("missing-argument", "shape", found="no boxes", hint="list at least one box, or pass shape=")
    if len({box.ndim for box in boxes}) > 1:
        raise refusal(
            "shape-mismatch",
            found=f"boxes of {sorted({b.ndim for b in boxes})} dims",
            hint="boxes of one tensor have the same number of dims",
        )
    return tuple(max(ends) for ends in zip(*(box.ends for box in boxes), strict=True))


def mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    """Return the value of a mesh, in global ranks. An axis in another order than its process group is refused."""
    from shard_reshard._shared.consensus import mesh_order_problems
    from shard_reshard._torch_compat import real_tensors

    with real_tensors():  # the ranks of a mesh are a real tensor, even under fake tensors
        raise_problems(mesh_order_problems(mesh))
        return MeshSpec.from_device_mesh(mesh)


def own_layout(name: str, value: Any, to_group: ToGroup) -> ShardMap | None:
    """Return the declared layout of a tensor; None for a plain tensor."""
    from shard_reshard._shared.sharding_info import sharding_info_of  # needs torch; the command line plans without

    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return resolve_layout((value.device_mesh, tuple(value.placements)), tuple(value.shape), to_group)
    from shard_spec.specs import EnumerableShardingSpec

    if isinstance(spec := getattr(value, "_sharding_info", None), EnumerableShardingSpec):  # of a ShardedTensor
        return resolve_layout(spec, None, to_group)
    try:
        info = sharding_info_of(value)
    except ValueError as error:
        raise refusal(
            "invalid-sections", name, found=str(error), hint="leave it out, or give its layout in src_layouts"
        ) from None
    if info is None:
        return None
    if info.sections:
        return _of_sections(name, info, to_group)
    return resolve_layout((info.mesh, info.placements), tuple(info.shape), to_group)


def _of_sections(name: str, info: ShardingInfo, to_group: ToGroup) -> ShardMap:
    """Return the layout of a weight with separately sharded sections, some with copies."""
    shape, mesh = tuple(info.shape), info.mesh
    try:
        axis, dim = info.section_axis()
    except ValueError as error:
        raise refusal(
            "invalid-sections",
            name,
            found=str(error),
            hint="give its layout in src_layouts: sections are sharded along one axis",
        ) from None
    size = mesh.size(axis)
    if sum(section.size for section in info.sections) != shape[dim] or any(
        unit < 1 or copies < 1 or length % unit or size % copies for length, unit, copies, _ in info.sections
    ):
        raise refusal(
            "invalid-sections",
            name,
            dim,
            found=f"sections {tuple(map(tuple, info.sections))} of dim {dim} of {shape} on {size} ranks",
            hint="sections add up to the dim, are a multiple of their unit, and copies divide the ranks of the axis",
        )
    spec = mesh_spec(mesh)
    boxes: dict[int, list[Box]] = {}
    # Position `place` of every group along the axis: ranks at one coordinate of it.
    for place, replicas in enumerate(zip(*spec.axis_groups(spec.axis_names[axis]), strict=True)):
        held = []
        for start, stop in info.ranges(place):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, stop - start
            held.append(Box(tuple(offsets), tuple(sizes)))
        boxes |= {to_group(rank): held for rank in replicas}
    return FusedShardMap(shape, boxes, dim)


def layout_mismatches(name: str, value: Any, wanted: ShardMap, members: GroupInfo) -> list[Problem]:
    """Return the mismatch between a tensor's declared layout and ``wanted``, on this rank."""
    try:
        own = own_layout(name, value, members.to_group)
    except PlanError as error:
        return [p.named(name) for p in error.problems]
    if own is None or own == wanted:  # nothing declared, or equal
        return []
    alike = own.shape == wanted.shape and sorted(own.reduce_ops) == sorted(wanted.reduce_ops)
    if alike and sorted(own.local_pieces(members.rank)) == sorted(wanted.local_pieces(members.rank)):
        return []  # equal on this rank, which is all it can check
    return [
        Problem(
            "layout-mismatch",
            name,
            found=f"it declares {own.describe()} of {own.shape}, not {wanted.describe()} of {wanted.shape}",
            hint="leave out the layout of a tensor that declares its own, redistribute it, or pass its to_local()",
        )
    ]
