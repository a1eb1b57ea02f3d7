"""Layouts that tensors declare themselves: DTensors, and local parameters that carry ``_sharding_info``."""

from __future__ import annotations

from typing import Any

from shard_spec import Box

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._shared.sharding_info import ShardingInfo, sharding_info_of
from shard_reshard._torch_compat import real_tensors
from shard_reshard.consensus import GroupInfo
from shard_reshard.layout.base import ShardMap
from shard_reshard.layout.boxes import FusedShardMap
from shard_reshard.layout.parse import ToGroup, resolve_layout


def own_layout(name: str, value: Any, to_group: ToGroup) -> ShardMap | None:
    """Return the layout that a tensor declares; None for a plain tensor."""
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return resolve_layout((value.device_mesh, tuple(value.placements)), tuple(value.shape), to_group)
    try:
        info = sharding_info_of(value)
    except ValueError as error:
        hint = "leave it out, or give its layout in src_layouts"
        raise PlanError(Problem("invalid-sections", name, found=str(error), hint=hint)) from None
    if info is None:
        return None
    if info.sections:
        return _of_sections(name, info, to_group)
    return resolve_layout((info.mesh, info.placements), tuple(info.shape), to_group)


def _of_sections(name: str, info: ShardingInfo, to_group: ToGroup) -> ShardMap:
    """Return the layout of a weight whose sections are sharded one by one, some of them with copies."""
    shape, mesh = tuple(info.shape), info.mesh
    try:
        axis, dim = info.section_axis()
    except ValueError as error:
        hint = "give its layout in src_layouts: sections are sharded along one axis"
        raise PlanError(Problem("invalid-sections", name, found=str(error), hint=hint)) from None
    size = mesh.size(axis)
    if sum(section.size for section in info.sections) != shape[dim] or any(
        unit < 1 or copies < 1 or length % unit or size % copies for length, unit, copies in info.sections
    ):
        found = f"sections {tuple(map(tuple, info.sections))} of dim {dim} of {shape} on {size} ranks"
        hint = "sections add up to the dim, are a multiple of their unit, and copies divide the ranks of the axis"
        raise PlanError(Problem("invalid-sections", name, dim, found=found, hint=hint))
    with real_tensors():
        lines = mesh.mesh.movedim(axis, 0).reshape(size, -1).tolist()  # for each place on the axis, its global ranks
    boxes: dict[int, list[Box]] = {}
    for place, replicas in enumerate(lines):
        held = []
        for start, stop in info.ranges(place):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, stop - start
            held.append(Box(tuple(offsets), tuple(sizes)))
        boxes |= {to_group(rank): held for rank in replicas}
    return FusedShardMap(shape, boxes, dim)


def layout_mismatches(name: str, value: Any, wanted: ShardMap, members: GroupInfo) -> list[Problem]:
    """Return a mismatch between a tensor's declared layout and ``wanted``, on this rank."""
    try:
        own = own_layout(name, value, members.to_group)
    except PlanError as error:
        return [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    if own is None or own == wanted:
        return []
    alike = own.shape == wanted.shape and sorted(own.reduce_ops) == sorted(wanted.reduce_ops)
    if alike and sorted(own.local_pieces(members.rank)) == sorted(wanted.local_pieces(members.rank)):
        return []  # the same on this rank
    found = f"it declares {own.describe()} of {own.shape}, not {wanted.describe()} of {wanted.shape}"
    hint = "leave out the layout of a tensor that declares its own, redistribute it, or pass its to_local()"
    return [Problem("layout-mismatch", name, found=found, hint=hint)]
