"""What all ranks agree on before a state dict moves: one plan, and which version it is."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import is_fake, real_tensors
from shard_reshard.agreement import agree, problems_of, raise_together
from shard_reshard.members import Members
from shard_reshard.problems import PlanError, Problem
from shard_reshard.rows import Topic, exchange_rows
from shard_reshard.state_dict_facts import local_tensor
from shard_reshard.state_dict_plan import DstLayouts, Facts, KeyMap, StateDictPlan
from shard_reshard.state_dict_planning import plan_state_dict

_MAX_PLANS = 16
# With each plan, the layouts it was made for: what is told apart by its id must not be freed while it is here.
_Plans = dict[tuple[bytes, ...], tuple[StateDictPlan, Any]]
_plans: WeakKeyDictionary[dist.ProcessGroup, _Plans] = WeakKeyDictionary()


def agreed_plan(
    members: Members,
    facts: Facts,
    tensors: Mapping[str, Any],
    dst_layouts: DstLayouts,
    key_map: KeyMap | None,
    bucket_bytes: int,
    version: int | None,
    strict: bool,
    versions: bool = True,
) -> tuple[StateDictPlan, int | None]:
    """The plan for what all ranks know. Facts travel only when a rank's have changed; a digest of them always."""
    asked = repr(sorted((key_map or {}).items())) + repr((bucket_bytes, strict, versions)) + _layouts_text(dst_layouts)
    digest = hashlib.sha256(pickle.dumps((facts, asked), protocol=4)).digest()[:24]
    values = values_row(facts, tensors)
    rows = exchange_rows(members, Topic.STATE_DICT, digest + values + version_row(version))()
    if rows is None:
        raise_together(members, f"a state dict of {sorted(facts.sources)}", ())
    stamp = agreed_version([row[32:] for row in rows])
    key = tuple(row[:24] for row in rows)
    plans = _plans.setdefault(members.group, {})
    plan, _ = plans.get(key, (None, None))
    if plan is not None:
        agree_on_values(members, facts, tensors, [row[24:32] for row in rows])
    else:
        everyone: list[Any] = [None] * members.size
        dist.all_gather_object(everyone, facts, group=members.group)
        problems = _plain_problems(members, facts, tensors)
        try:
            plan = plan_state_dict(everyone, dst_layouts, key_map, bucket_bytes, members.to_group, strict)
        except Exception as error:  # layouts may be a function of the caller's
            problems += problems_of(error)
        agree(members, plan.digest if plan is not None else "", problems, "always")
        assert plan is not None
        plans[key] = plan, dict(dst_layouts) if isinstance(dst_layouts, Mapping) else dst_layouts
        while len(plans) > _MAX_PLANS:
            plans.pop(next(iter(plans)))
    return plan, stamp


def version_row(version: int | None) -> bytes:
    return struct.pack("<?q", version is not None, version or 0)


def agreed_version(rows: list[bytes]) -> int | None:
    """The version that those who give one give; on all ranks the same."""
    stamps = sorted({number for given, number in (struct.unpack("<?q", row[:9]) for row in rows) if given})
    if len(stamps) > 1:
        hint = "every rank that sends gives the same version"
        raise PlanError(Problem("ranks-disagree", "version", found=f"versions {stamps}", hint=hint))
    return stamps[0] if stamps else None


def values_row(facts: Facts, tensors: Mapping[str, Any]) -> bytes:
    """Eight bytes that tell the values of this rank's plain tensors; zeros where it has none."""
    plain = [name for name, known in facts.sources.items() if known.layout == "" and name in tensors]
    if not plain or is_fake(()):
        return bytes(8)
    return hashlib.sha256(repr([(name, checksum(tensors[name])) for name in plain]).encode()).digest()[:8]


def agree_on_values(members: Members, facts: Facts, tensors: Mapping[str, Any], rows: list[bytes]) -> None:
    """Compare plain tensors one by one, where the ranks that have some have different ones.

    Raises:
        PlanError: On all ranks.
    """
    if len({row for row in rows if any(row)}) > 1:
        problems = _plain_problems(members, facts, tensors)
        if problems:
            raise PlanError(problems)


def _plain_problems(members: Members, facts: Facts, tensors: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Plain tensors that ranks pass under one name have to be one value: else they are shards, and would get lost."""
    plain = [name for name, known in facts.sources.items() if known.layout == "" and name in tensors]
    sums = {name: checksum(tensors[name]) for name in plain}
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, sums, group=members.group)
    problems = []
    for name in sorted({name for found in everyone for name in found}):
        values = [found[name] for found in everyone if name in found]
        if len(set(values)) > 1:
            found = "plain tensors that differ between ranks"
            hint = "if they are shards, say so in src_layouts (and shapes)"
            problems.append(Problem("layout-needed", name, found=found, hint=hint))
    return tuple(problems)


_CHUNK = 1 << 19  # numbers that are summed at a time


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bytes, one of them weighted by position: equal tensors have equal ones."""
    local = local_tensor(tensor).resolve_conj().resolve_neg().contiguous()
    if not local.numel():
        return 0, 0
    data = local.reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    body = data[:whole]
    numbers = (body.clone() if body.storage_offset() % 8 else body).view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)  # read once, at the end
    weights = torch.arange(1, min(_CHUNK, max(numbers.numel(), 8)) + 1, device=data.device) * 2 + 1
    chunks = [*torch.split(numbers, _CHUNK), data[whole:].to(torch.int64)]
    for number, values in enumerate(chunks):
        sums[0] += values.sum()
        sums[1] += (number + 1) * (values * weights[: values.numel()]).sum()
    total, weighted = sums.tolist()
    return total, weighted


def _layouts_text(dst_layouts: DstLayouts) -> str:
    if isinstance(dst_layouts, Mapping):
        return repr(sorted((name, _layout_text(layout)) for name, layout in dst_layouts.items()))
    # A function is asked again when it is another object; one that changes its mind has to be another object.
    return f"function {id(dst_layouts)}" if callable(dst_layouts) else _layout_text(dst_layouts)


def _layout_text(layout: Any) -> str:
    """The text of a layout; that of a DeviceMesh does not name its ranks."""
    if hasattr(layout, "device_mesh") and hasattr(layout, "placements"):
        layout = layout.device_mesh, tuple(layout.placements)
    if isinstance(layout, tuple) and len(layout) == 2 and hasattr(layout[0], "mesh"):
        with real_tensors():
            return f"{layout[0]!r} of ranks {layout[0].mesh.tolist()} {layout[1]!r}"
    return repr(layout)


def exchange_version(
    members: Members, version: int | None, facts: Facts, tensors: Mapping[str, Any]
) -> Callable[[], int | None]:
    """Begin to compare versions and the values of plain tensors.

    Returns:
        A function that waits and gives the version that all agree on.
    """
    if is_fake(()):
        return lambda: version
    values = values_row(facts, tensors)
    waiting = exchange_rows(members, Topic.VERSION, version_row(version) + values)

    def agreed() -> int | None:
        rows = waiting()
        if rows is None:
            hint = "make the same calls in the same order on every rank of the group"
            raise PlanError(Problem("ranks-disagree", "version", found="a rank that made another call", hint=hint))
        agree_on_values(members, facts, tensors, [row[9:17] for row in rows])
        return agreed_version(rows)

    return agreed
