"""What the tensors of a call say of themselves, beside what the plan was made for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from shard_spec import Box

from shard_reshard._torch_compat import real_tensors
from shard_reshard.bind import ToGroup, bind
from shard_reshard.bound import BoundLayout
from shard_reshard.box_bound import BoxBound, FusedBound
from shard_reshard.members import Members
from shard_reshard.problems import PlanError, Problem
from shard_reshard.shared_memory import address
from shard_reshard.state_dict_plan import Known, StateDictPlan
from shard_reshard.windows import bound_from_json


def own_layout(name: str, value: Any, to_group: ToGroup) -> BoundLayout | None:
    """The layout that a tensor tells of itself: a DTensor, or a shard with ``_sharding_info``."""
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return bind((value.device_mesh, tuple(value.placements)), tuple(value.shape), to_group)
    info = getattr(value, "_sharding_info", None)
    if info is None:
        return None
    mesh, placements, shape = info[0], tuple(info[1]), tuple(info[2])
    if len(info) > 4 and info[4]:
        return _of_sections(name, mesh, placements, shape, tuple(info[4]), to_group)
    return bind((mesh, placements), shape, to_group)


def _of_sections(
    name: str, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], sections: Any, to_group: ToGroup
) -> BoundLayout:
    """The layout of a weight whose sections are sharded one by one, in units, and held by several ranks alike.

    A section is ``(size, unit, copies)``: each run of ``unit`` rows stays together, and ``copies`` neighbouring ranks
    hold the same; or a size alone.
    """
    from shard_spec import Replicate, Shard

    sharded = [at for at, placement in enumerate(placements) if isinstance(placement, Shard)]
    if len(sharded) != 1 or not all(isinstance(placement, Shard | Replicate) for placement in placements):
        found = f"sections {sections} with placements {placements}"
        hint = "give its layout in src_layouts: sections are cut by one axis"
        raise PlanError(Problem("ambiguous-sections", name, found=found, hint=hint))
    dim = placements[sharded[0]].dim % max(len(shape), 1)
    triples = [(section, 1, 1) if isinstance(section, int) else tuple(section) for section in sections]
    with real_tensors():
        ranks = (
            mesh.mesh.movedim(sharded[0], 0).flatten(1).tolist() if mesh.ndim > 1 else [[r] for r in mesh.mesh.tolist()]
        )
    if (
        not shape
        or sum(size for size, _, _ in triples) != shape[dim]
        or any(unit < 1 or copies < 1 or size % unit or len(ranks) % copies for size, unit, copies in triples)
    ):
        found = f"sections {sections} of dim {dim} of {shape} on {len(ranks)} ranks"
        hint = "sections add up to the dim, are whole numbers of units, and copies divide the ranks of the axis"
        raise PlanError(Problem("bad-sections", name, dim, found=found, hint=hint))
    boxes: dict[int, list[Box]] = {}
    for place, replicas in enumerate(ranks):
        held, begin = [], 0
        for size, unit, copies in triples:
            step = -(-(size // unit) // (len(ranks) // copies)) * unit  # as torch.chunk divides units
            start = min(place // copies * step, size)
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = begin + start, min(start + step, size) - start
            held.append(Box(tuple(offsets), tuple(sizes)))
            begin += size
        boxes |= {to_group(rank): held for rank in replicas}
    return FusedBound(shape, boxes, dim)


def told_problems(name: str, value: Any, wanted: BoundLayout, members: Members) -> list[Problem]:
    """How what a tensor tells of itself differs, on this rank, from the layout that it is taken for."""
    try:
        own = own_layout(name, value, members.to_group)
    except PlanError as error:
        return [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    if own is None or same_here(own, wanted, members.rank):
        return []
    found = f"it says that it lies as {own.describe()} of {own.shape}, not as {wanted.describe()} of {wanted.shape}"
    hint = "leave out the layout of a tensor that tells its own, redistribute it, or pass its to_local()"
    return [Problem("layout-differs", name, found=found, hint=hint)]


def same_here(one: BoundLayout, other: BoundLayout, rank: int) -> bool:
    """Whether two layouts put the same on ``rank``."""
    if one == other:
        return True
    alike = one.shape == other.shape and sorted(one.reduce_ops) == sorted(other.reduce_ops)
    return alike and sorted(one.local_pieces(rank)) == sorted(other.local_pieces(rank))


class Told:
    """Compares the tensors of each call with those that a resharder was made for.

    Args:
        plan: What the resharder does.
        known: What this rank knew of its sources when the plan was made.
        left_out: Names that ``key_map`` leaves out.
        members: The group.
    """

    def __init__(
        self, plan: StateDictPlan, known: Mapping[str, Known], left_out: Collection[str], members: Members
    ) -> None:
        self._plan, self._known, self._members = plan, known, members
        self._fine: dict[tuple[bool, str], object] = {}  # what a tensor last said that was found to be right
        moved = {move.source for move in plan.moves}
        self._tied = [
            (name, entry.tied_to)
            for name, entry in known.items()
            if entry.tied_to != name and name not in moved and name not in left_out
        ]

    def problems(
        self, tensors: Mapping[str, Any], sources: Mapping[str, torch.Tensor], targets: Mapping[str, Any]
    ) -> list[Problem]:
        """What is wrong with tensors that are given (locally ``sources``) and with those that are to be filled."""
        problems: list[Problem] = []
        if not tensors.keys() <= self._known.keys():
            strange = sorted(tensors.keys() - self._known.keys())
            hint = "leave them out, or make a resharder for a state dict that has them"
            problems.append(Problem("unknown-key", "state_dict", found=", ".join(map(repr, strange)), hint=hint))
        for name, first in self._tied:
            if name in sources and first in sources and not _one_memory(sources[name], sources[first]):
                hint = "make another resharder: this one moves them as one tensor"
                problems.append(Problem("untied", name, found=f"no longer the memory of {first}", hint=hint))
        for side, given in ((False, tensors), (True, targets)):
            for name, value in given.items():
                says = _says(value)
                if says is not None and self._fine.get((side, name)) != says:
                    wanted = self._wanted(side, name)
                    wrong = [] if wanted is None else told_problems(name, value, wanted, self._members)
                    problems += wrong
                    if not wrong:
                        self._fine[side, name] = says
        return problems

    def _wanted(self, is_target: bool, name: str) -> BoundLayout | None:
        if is_target:
            return self._plan.targets[name][0] if name in self._plan.targets else None
        known = self._known.get(name)
        if known is None:
            return None
        if not known.layout:
            return BoxBound.whole(known.shape, self._members.rank)
        return bound_from_json(known.shape, json.loads(known.layout))


def _says(value: Any) -> object:
    """What a tensor says of where it lies, to be compared; None where it says nothing."""
    if hasattr(value, "device_mesh"):
        return value.device_mesh, tuple(value.placements), tuple(value.shape)
    info = getattr(value, "__dict__", {}).get("_sharding_info")
    return None if info is None else tuple(info)


def _one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel():
        return True
    return (address(one), one.shape, one.stride()) == (address(other), other.shape, other.stride())
