"""Consensus of ranks before a state dict moves: one plan, and equal values of plain tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import is_fake, mesh_groups, real_tensors
from shard_reshard.execution.mover import recall, remember
from shard_reshard.group import GroupInfo, all_gather_row, assert_consistent, raise_on_all_ranks
from shard_reshard.plan.plan import group_problems
from shard_reshard.state_dict.meta import local_tensor
from shard_reshard.state_dict.plan import DstLayouts, KeyMap, RankMeta, StateDictPlan
from shard_reshard.state_dict.planner import plan_state_dict

_STATE_DICT, _CALL, _CHANGES = 3, 4, 5  # topics of gathered rows


class Question(NamedTuple):
    """Arguments of a call beside its tensors, equal on every rank."""

    dst_layouts: DstLayouts
    key_map: KeyMap | None
    bucket_bytes: int
    strict: bool
    check: str
    changed_only: int = 0  # period of full transfers, in calls
    serial: int = 0  # unique if layouts are a function: results may change

    def text(self) -> str:
        """Return it as text, for comparison between ranks."""
        options = (self.bucket_bytes, self.strict, self.check, self.changed_only)
        layouts = self.dst_layouts
        if isinstance(layouts, Mapping):
            text = repr(sorted((name, _layout_text(layout)) for name, layout in layouts.items()))
        else:
            text = f"function {self.serial}" if callable(layouts) else _layout_text(layouts)
        return repr(sorted((self.key_map or {}).items())) + repr(options) + text


def metadata_digest(facts: RankMeta, question: Question) -> bytes:
    """Return a digest of this rank's metadata and arguments."""
    return hashlib.sha256(repr((facts, question.text())).encode()).digest()[:24]


def agreed_plan(
    members: GroupInfo,
    facts: RankMeta,
    digest: bytes,
    tensors: Mapping[str, Any],
    question: Question,
    repeated: bool = False,
) -> tuple[StateDictPlan, bool]:
    """Return the plan for all ranks' metadata, sent only after changes.

    The second value is True if each rank's call is ``repeated``: equal to an earlier call without problems.
    """
    try:
        row = digest + values_row(facts, tensors) + bytes([repeated])
    except Exception as error:
        raise_on_all_ranks(members, error)
    rows = [digest + bytes(9)] * members.size  # fake tensors have no peers
    if not is_fake(()):
        rows = all_gather_row(members, _STATE_DICT, row, [f"a state dict of {sorted(facts.sources)}"])
    key = tuple(row[:24] for row in rows)
    # With the plan, its layouts: their ids are in the key and must not be reused while the plan is cached.
    plan, _ = recall(members.group, "state dict plan", key) or (None, None)
    if plan is not None:
        agree_on_values(members, facts, tensors, [row[24:32] for row in rows])
        return plan, all(row[32] for row in rows)
    plan = _plan_of_all(members, facts, tensors, question)
    layouts = question.dst_layouts
    held = plan, dict(layouts) if isinstance(layouts, Mapping) else layouts
    remember(members.group, "state dict plan", key, held)
    return plan, False


def _plan_of_all(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any], question: Question) -> StateDictPlan:
    """Gather the metadata of all ranks and compare the plans derived from it; a collective."""
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, facts, group=members.group)
    problems = _plain_problems(members, facts, tensors)
    plan = None
    try:
        plan = plan_state_dict(
            everyone, question.dst_layouts, question.key_map, question.bucket_bytes, members.to_group, question.strict
        )
    except Exception as error:  # layouts may be the caller's function
        problems += problems_of(error)
    lines: list[str] = []
    if plan is not None:
        problems += group_problems((move.plan for move in plan.moves), members.size)
        lines = [*plan.lines, f"check={question.check} changed_only={question.changed_only}", f"plan {plan.digest}"]
    assert_consistent(members, "a state dict", lines, problems)
    assert plan is not None
    return plan


def values_row(facts: RankMeta, tensors: Mapping[str, Any]) -> bytes:
    """Return eight bytes of digest of this rank's plain tensors; zeros if it has none."""
    sums = {} if is_fake(()) else plain_checksums(facts, tensors)
    return hashlib.sha256(repr(list(sums.items())).encode()).digest()[:8] if sums else bytes(8)


def agree_on_values(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any], rows: list[bytes]) -> None:
    """Compare plain tensors one by one if ranks with such tensors differ; all ranks raise."""
    if len({row for row in rows if any(row)}) > 1:  # zeros: a rank without plain tensors
        problems = _plain_problems(members, facts, tensors)
        if problems:
            raise PlanError(problems)


def _plain_problems(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any]) -> list[Problem]:
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, plain_checksums(facts, tensors), group=members.group)
    return differing_tensors(everyone)


def plain_checksums(facts: RankMeta, tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a checksum of each of this rank's tensors without a declared layout."""
    plain = [name for name, known in facts.sources.items() if known.layout is None and name in tensors]
    return {name: checksum(tensors[name]) for name in plain}


def differing_tensors(everyone: Sequence[Mapping[str, bytes]]) -> list[Problem]:
    """Report plain tensors of one name with different values: they are shards, and would get lost."""
    problems = []
    for name in sorted({name for found in everyone for name in found}):
        values = [found[name] for found in everyone if name in found]
        if len(set(values)) > 1:
            found = "plain tensors that differ between ranks"
            hint = "if they are shards, declare them in src_layouts (and shapes)"
            problems.append(Problem("missing-argument", name, found=found, hint=hint))
    return problems


_CHUNK = 1 << 19  # numbers per sum
_ODD = 0x1E3779B97F4A7C15  # arbitrary odd constant


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a digest of sums over a tensor's bytes mixed with their positions.

    Sums of the bytes alone, even weighted, do not detect swapped signs: 2**63 times an even number is 0.
    """
    local = local_tensor(tensor).resolve_conj().resolve_neg().contiguous()
    if not local.numel():
        return b""
    data = local.reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    body = data[:whole]
    numbers = (body.clone() if body.storage_offset() % 8 else body).view(torch.int64)
    keys = (torch.arange(min(_CHUNK, max(numbers.numel(), 8)), device=data.device) * 2 + 1) * _ODD
    sums = []
    for values in (*torch.split(numbers, _CHUNK), *([data[whole:].to(torch.int64)] if whole < data.numel() else [])):
        mixed = values + keys[: values.numel()]
        mixed ^= mixed >> 29  # the highest bits affect the product too
        sums += [mixed.sum(), mixed.mul_(keys[: values.numel()]).sum()]
    # One transfer from the device, at the end.
    return hashlib.sha256(repr(torch.stack(sums).tolist()).encode()).digest()[:16]


def _layout_text(layout: Any) -> str:
    """Return the text of a layout; for a DeviceMesh with ranks and groups, which its repr lacks."""
    if hasattr(layout, "device_mesh") and hasattr(layout, "placements"):
        layout = layout.device_mesh, tuple(layout.placements)
    if isinstance(layout, tuple) and len(layout) == 2 and hasattr(layout[0], "mesh"):
        with real_tensors():
            return f"{layout[0]!r} of ranks {layout[0].mesh.tolist()} in {mesh_groups(layout[0])} {layout[1]!r}"
    return repr(layout)


def agree_on_call(
    members: GroupInfo,
    plan: StateDictPlan,
    facts: RankMeta,
    tensors: Mapping[str, Any],
    problems: Sequence[Problem],
    token: bytes = b"",
) -> list[bytes]:
    """Compare a call of a kept resharder: plan, plain tensors, problems. All raise before any transfer.

    Returns:
        The rows of all ranks, with their tokens first.
    """
    values = bytes(8)  # zeros: nothing to compare
    try:
        values = values if problems else values_row(facts, tensors)
    except Exception as error:  # an error of this rank stops all
        problems = (*problems, *problems_of(error))
    row = token + bytes.fromhex(plan.digest[:32]) + values
    lines = [f"a call of the resharder of state dict plan {plan.digest}"]
    rows = all_gather_row(members, _CHANGES if token else _CALL, row, lines, problems)
    start = len(token)
    if len({other[start : start + 16] for other in rows}) > 1:
        assert_consistent(members, "a state dict", lines, problems)
    agree_on_values(members, facts, tensors, [other[start + 16 : start + 24] for other in rows])
    return rows
