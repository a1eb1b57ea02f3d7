"""Agreement of ranks before a state dict moves: one plan, and one version."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import is_fake, real_tensors
from shard_reshard.consensus import (
    GroupInfo,
    Topic,
    all_gather_header,
    assert_consistent,
    problems_of,
    raise_joined,
    raise_on_all_ranks,
)
from shard_reshard.plan.plan import group_problems
from shard_reshard.state_dict.meta import local_tensor
from shard_reshard.state_dict.plan import DstLayouts, KeyMap, RankMeta, StateDictPlan
from shard_reshard.state_dict.planner import plan_state_dict

_MAX_PLANS = 16
# With each plan, the layouts it was made for: what is told apart by its id must not be freed while it is here.
_Plans = dict[tuple[bytes, ...], tuple[StateDictPlan, Any]]
_plans: WeakKeyDictionary[dist.ProcessGroup, _Plans] = WeakKeyDictionary()


class Question(NamedTuple):
    """Arguments of a call beside its tensors, equal on every rank."""

    dst_layouts: DstLayouts
    key_map: KeyMap | None
    bucket_bytes: int
    strict: bool
    versions: bool
    check: str
    changed_only: int = 0  # every how many calls everything is sent
    serial: int = 0  # of a question whose layouts are a function: what it answers may change, so that none are equal

    def text(self) -> str:
        """Return it as text, for ranks to compare."""
        asked = (self.bucket_bytes, self.strict, self.versions, self.check, self.changed_only)
        layouts = self.dst_layouts
        if isinstance(layouts, Mapping):
            text = repr(sorted((name, _layout_text(layout)) for name, layout in layouts.items()))
        else:
            text = f"function {self.serial}" if callable(layouts) else _layout_text(layouts)
        return repr(sorted((self.key_map or {}).items())) + repr(asked) + text


def metadata_digest(facts: RankMeta, question: Question) -> bytes:
    """Return a digest of what this rank has and is asked."""
    return hashlib.sha256(repr((facts, question.text())).encode()).digest()[:24]


def agreed_plan(
    members: GroupInfo,
    facts: RankMeta,
    digest: bytes,
    tensors: Mapping[str, Any],
    question: Question,
    version: int | None,
    repeated: bool = False,
) -> tuple[StateDictPlan, int | None, bool]:
    """Return the plan for the metadata of all ranks, and the version. Metadata travels only when a rank's changed.

    The third value is True where each rank's call is ``repeated``: it did the same before, and had no problem.
    """
    try:
        row = digest + values_row(facts, tensors) + version_row(version, _REPEATED * repeated)
    except Exception as error:
        raise_on_all_ranks(members, error)
    headers = all_gather_header(members, Topic.STATE_DICT, row)()
    if headers is None:
        raise_joined(members, f"a state dict of {sorted(facts.sources)}", ())
    stamp = agreed_version([header[32:] for header in headers])
    key = tuple(header[:24] for header in headers)
    plans = _plans.setdefault(members.group, {})
    plan, _ = plans.get(key, (None, None))
    if plan is not None:
        agree_on_values(members, facts, tensors, [header[24:32] for header in headers])
        return plan, stamp, all(header[32] & _REPEATED for header in headers)
    plan = _plan_of_all(members, facts, tensors, question)
    layouts = question.dst_layouts
    plans[key] = plan, dict(layouts) if isinstance(layouts, Mapping) else layouts
    while len(plans) > _MAX_PLANS:
        plans.pop(next(iter(plans)))
    return plan, stamp, False


def _plan_of_all(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any], question: Question) -> StateDictPlan:
    """Gather the metadata of all ranks and compare the plans that they make of it; a collective."""
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, facts, group=members.group)
    problems = _plain_problems(members, facts, tensors)
    plan = None
    try:
        plan = plan_state_dict(
            everyone, question.dst_layouts, question.key_map, question.bucket_bytes, members.to_group, question.strict
        )
    except Exception as error:  # layouts may be a function of the caller's
        problems += problems_of(error)
    if plan is not None:
        problems += (*group_problems((move.plan for move in plan.moves), members.size),)
    options = f" versions={question.versions} check={question.check} changed_only={question.changed_only}"
    assert_consistent(members, plan.digest + options if plan is not None else "", problems, "always")
    assert plan is not None
    return plan


_FAILED, _REPEATED = 2, 4  # beside 1: a version is given


def version_row(version: int | None, flag: int = 0) -> bytes:
    try:
        return struct.pack("<Bq", (version is not None) | flag, 0 if version is None else version)
    except struct.error:
        hint = "a whole number of at most 63 bits"
        raise PlanError(Problem("invalid-argument", "version", found=repr(version), hint=hint)) from None


def agreed_version(rows: list[bytes]) -> int | None:
    """The version that those who give one give; on all ranks the same."""
    stamps = sorted({number for given, number in (struct.unpack("<Bq", row[:9]) for row in rows) if given & 1})
    if len(stamps) > 1:
        hint = "every rank that sends gives the same version"
        raise PlanError(Problem("ranks-disagree", "version", found=f"versions {stamps}", hint=hint))
    return stamps[0] if stamps else None


def values_row(facts: RankMeta, tensors: Mapping[str, Any]) -> bytes:
    """Eight bytes that tell the values of this rank's plain tensors; zeros where it has none."""
    plain = [name for name, known in facts.sources.items() if known.layout is None and name in tensors]
    if not plain or is_fake(()):
        return bytes(8)
    return hashlib.sha256(repr([(name, checksum(tensors[name])) for name in plain]).encode()).digest()[:8]


def agree_on_values(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any], rows: list[bytes]) -> None:
    """Compare plain tensors one by one, where the ranks that have some have different ones; all ranks raise."""
    if len({row for row in rows if any(row)}) > 1:
        problems = _plain_problems(members, facts, tensors)
        if problems:
            raise PlanError(problems)


def _plain_problems(members: GroupInfo, facts: RankMeta, tensors: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Plain tensors that ranks pass under one name have to be one value: else they are shards, and would get lost."""
    plain = [name for name, known in facts.sources.items() if known.layout is None and name in tensors]
    sums = {name: checksum(tensors[name]) for name in plain}
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, sums, group=members.group)
    problems = []
    for name in sorted({name for found in everyone for name in found}):
        values = [found[name] for found in everyone if name in found]
        if len(set(values)) > 1:
            found = "plain tensors that differ between ranks"
            hint = "if they are shards, declare them in src_layouts (and shapes)"
            problems.append(Problem("missing-argument", name, found=found, hint=hint))
    return tuple(problems)


_CHUNK = 1 << 19  # numbers that are summed at a time
_ODD = 0x1E3779B97F4A7C15  # of no pattern


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a digest of sums over numbers that are mixed of a tensor's bytes and their positions.

    Sums of the bytes alone, however weighted, are blind to signs that change places: 2**63 times an even number is 0.
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
        mixed ^= mixed >> 29  # so that the highest bits count below too
        sums += [mixed.sum(), mixed.mul_(keys[: values.numel()]).sum()]
    # Read once, at the end.
    return hashlib.sha256(repr(torch.stack(sums).tolist()).encode()).digest()[:16]


def _layout_text(layout: Any) -> str:
    """The text of a layout; that of a DeviceMesh does not name its ranks."""
    if hasattr(layout, "device_mesh") and hasattr(layout, "placements"):
        layout = layout.device_mesh, tuple(layout.placements)
    if isinstance(layout, tuple) and len(layout) == 2 and hasattr(layout[0], "mesh"):
        with real_tensors():
            return f"{layout[0]!r} of ranks {layout[0].mesh.tolist()} {layout[1]!r}"
    return repr(layout)


# ---- each call of a resharder ---------------------------------------------------------------------------------


class CallFacts(NamedTuple):
    """Facts of one call on this rank, which all ranks compare: version, plain tensors, plan, and local problems."""

    plan: str  # digest
    facts: RankMeta
    tensors: Mapping[str, Any]
    row: bytes
    problems: Sequence[Problem]

    @classmethod
    def of(
        cls,
        plan: StateDictPlan,
        facts: RankMeta,
        tensors: Mapping[str, Any],
        version: int | None,
        problems: Sequence[Problem],
    ) -> CallFacts:
        """Return the facts of a call; a rank with problems takes part, so that all raise them together."""
        try:
            row = version_row(version, _FAILED * bool(problems)) + (
                bytes(8) if problems else values_row(facts, tensors)
            )
        except Exception as error:  # whatever keeps this rank from comparing keeps all from going on
            problems = (*problems, *problems_of(error))
            row = version_row(None, _FAILED) + bytes(8)
        return cls(plan.digest, facts, tensors, row + bytes.fromhex(plan.digest[:16]), problems)

    def agree(self, members: GroupInfo, token: bytes = b"") -> tuple[int | None, list[bytes]]:
        """Return the version, and the tokens and facts of all ranks; they all raise before anything moves."""
        topic, start = Topic.CHANGES if token else Topic.VERSION, len(token)
        found = all_gather_header(members, topic, token + self.row)() or []
        rows = [row[start:] for row in found]
        if not rows or any(row[0] & _FAILED for row in rows) or len({row[17:25] for row in rows}) > 1:
            raise_joined(members, f"a call of the resharder of state dict plan {self.plan}", self.problems)
        agree_on_values(members, self.facts, self.tensors, [row[9:17] for row in rows])
        return agreed_version(rows), found


_TOKEN_BYTES = 16


class VersionChain:
    """Token of the calls that a rank took part in: equal on all ranks, changes alone may be sent."""

    def __init__(self, anchor_every: int) -> None:
        given: object = anchor_every
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            hint = "a number of calls: 1 sends everything in every call"
            raise PlanError(Problem("invalid-argument", "anchor_every", found=repr(given), hint=hint))
        self._anchor_every = self._calls = anchor_every  # the first call sends everything
        self._token = self._next = os.urandom(_TOKEN_BYTES)  # equal to no other rank's

    def agree(self, members: GroupInfo, call: CallFacts) -> tuple[bool, int | None]:
        """Return True where everything has to be sent, and the version; errors as in `CallFacts.agree`."""
        # Until the call has ended no rank holds a state that is known: one that fails has a token of its own.
        token, self._token = self._token, os.urandom(_TOKEN_BYTES)
        version, rows = call.agree(members, token)
        full = len({row[:_TOKEN_BYTES] for row in rows}) > 1 or self._calls >= self._anchor_every
        self._calls = 1 if full else self._calls + 1
        self._next = hashlib.sha256(b"".join(rows)).digest()[:_TOKEN_BYTES]
        return full, version

    def done(self) -> None:
        """End a call that brought everything."""
        self._token = self._next
