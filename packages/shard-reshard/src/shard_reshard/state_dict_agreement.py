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

from shard_reshard._torch_compat import is_fake
from shard_reshard.agreement import agree, problems_of, raise_together
from shard_reshard.members import Members
from shard_reshard.problems import PlanError, Problem
from shard_reshard.rows import Topic, exchange_rows
from shard_reshard.state_dict_plan import DstLayouts, Facts, KeyMap, StateDictPlan, plan_state_dict

_MAX_PLANS = 16
_plans: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[bytes, ...], StateDictPlan]] = WeakKeyDictionary()


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
    digest = hashlib.sha256(pickle.dumps((facts, asked), protocol=4)).digest()
    rows = exchange_rows(members, Topic.STATE_DICT, digest + version_row(version))()
    if rows is None:
        raise_together(members, f"a state dict of {sorted(facts.sources)}", ())
    stamp = agreed_version([row[32:] for row in rows])
    key = tuple(row[:32] for row in rows)
    plans = _plans.setdefault(members.group, {})
    plan = plans.get(key)
    if plan is None:
        everyone: list[Any] = [None] * members.size
        dist.all_gather_object(everyone, facts, group=members.group)
        problems = _plain_problems(members, facts, tensors)
        try:
            plan = plan_state_dict(everyone, dst_layouts, key_map, bucket_bytes, members.to_group, strict)
        except Exception as error:  # layouts may be a function of the caller's
            problems += problems_of(error)
        agree(members, plan.digest if plan is not None else "", problems, "always")
        assert plan is not None
        plans[key] = plan
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


def _plain_problems(members: Members, facts: Facts, tensors: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Plain tensors that ranks pass under one name have to be one value: else they are shards, and would get lost."""
    plain = [name for name, known in facts.sources.items() if known.layout == ""]
    sums = {name: _checksum(tensors[name]) for name in plain}
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


_CHUNK = 1 << 22  # bytes that are summed at a time: sums need eight times as much


def _checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bytes, one of them weighted by position: equal tensors have equal ones."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    weights = torch.arange(1, min(_CHUNK, data.numel()) + 1, device=data.device).remainder_(65521)
    total = weighted = 0
    for number in range(-(-data.numel() // _CHUNK)):
        values = data[number * _CHUNK : (number + 1) * _CHUNK].to(torch.int64)
        total += int(values.sum())
        weighted += (number + 1) * int((values * weights[: values.numel()]).sum())
    return total, weighted


def _layouts_text(dst_layouts: DstLayouts) -> str:
    if isinstance(dst_layouts, Mapping):
        return repr(sorted((name, repr(layout)) for name, layout in dst_layouts.items()))
    # A function is asked again when it is another object; one that changes its mind has to be another object.
    return f"function {id(dst_layouts)}" if callable(dst_layouts) else repr(dst_layouts)


def exchange_version(members: Members, version: int | None) -> Callable[[], int | None]:
    """Begin to compare versions; the function that is returned waits and gives the one that all agree on."""
    if is_fake(()):
        return lambda: version
    waiting = exchange_rows(members, Topic.VERSION, version_row(version))

    def agreed() -> int | None:
        rows = waiting()
        if rows is None:
            hint = "make the same calls in the same order on every rank of the group"
            raise PlanError(Problem("ranks-disagree", "version", found="a rank that made another call", hint=hint))
        return agreed_version(rows)

    return agreed
