"""Reshard a whole state dict: trainer to server, checkpoint to model, in a few fused exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shard_reshard.agreement import check_mode, tell
from shard_reshard.bind import LayoutLike
from shard_reshard.compiled import not_compiled
from shard_reshard.copying import StaysHere
from shard_reshard.looks import SeenState, seen_state
from shard_reshard.members import members_of
from shard_reshard.problems import PlanError, Problem
from shard_reshard.state_dict_agreement import agreed_plan, exchange_version
from shard_reshard.state_dict_facts import (
    VERSION_KEY,
    device_of,
    facts_of,
    local_tensor,
    local_tensors,
    stamp_version,
    tensors_of,
)
from shard_reshard.state_dict_moves import (
    Arriving,
    Bucket,
    Here,
    MovedStateDict,
    Progress,
    bucket_calls,
    check_calls,
    deliver,
    move_buckets,
    mover_for_bucket,
)
from shard_reshard.state_dict_plan import DstLayouts, KeyMap
from shard_reshard.state_dict_told import Told


def reshard_state_dict(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    dst_layouts: DstLayouts = None,
    *,
    src_layouts: Mapping[str, LayoutLike] | None = None,
    shapes: Mapping[str, Any] | None = None,
    out: torch.nn.Module | Mapping[str, Any] | None = None,
    key_map: KeyMap | None = None,
    bucket_bytes: int = 64 * 2**20,
    group: dist.ProcessGroup | None = None,
    version: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    atomic: bool = True,
    strict: bool = True,
    check: str = "first",
) -> MovedStateDict:
    """Move all tensors of a state dict to other layouts, ranks, names or dtypes.

    Every rank of ``group`` calls it. A rank that has no part of the source passes an empty mapping.

    Args:
        state_dict: A module, or FQN -> DTensor or local tensor. A local tensor's layout is in ``src_layouts``, or
            else in its ``_sharding_info``. One that has neither has to be whole and equal on every rank that passes
            it, which is checked. DTensors on separate sub-meshes of one make (the tensor-parallel groups of data
            parallelism) are replicas.
        dst_layouts: Layout by destination name, one for all, or a function of name and global shape. Names that it
            leaves out go where the tensor of ``out`` lies (a plain one is whole).
        src_layouts: Layouts of local tensors.
        shapes: Global shapes of local tensors, where their layout does not tell.
        out: A module or mapping whose tensors are filled in place; its dtypes are cast to.
        key_map: Source name -> destination name, `Part` of one, several parts, or None to leave it out.
        bucket_bytes: About how many buffer bytes a rank may use for one exchange.
        group: The union of all ranks; None is the default group.
        version: A number that says which state this is; ranks with sources give the same, receivers read it. Numbers
            that differ raise on all ranks before ``out`` is filled; where it is filled as tensors arrive
            (``atomic=False``), it then has no version.
        progress: Called on each rank after each tensor.
        atomic: Fill ``out`` only when everything has arrived: it costs memory for one more copy, and if a sender
            dies ``out`` keeps its old values and version. False fills ``out`` as tensors arrive.
        strict: A tensor of ``out`` that no source fills is a problem; False leaves it as it is.
        check: "first" or "always", see `reshard`.

    Returns:
        The tensors of this rank by destination name, with ``.plan`` and ``.version``.

    Raises:
        PlanError: With the problems of all tensors of all ranks, on every rank, before any data moves.
        RuntimeError: When an exchange fails because a rank died.
    """
    if torch.compiler.is_compiling():
        not_compiled("reshard_state_dict")
    resharder = StateDictResharder(
        state_dict,
        dst_layouts,
        src_layouts=src_layouts,
        shapes=shapes,
        out=out,
        key_map=key_map,
        bucket_bytes=bucket_bytes,
        group=group,
        version=version,
        strict=strict,
        check=check,
        keep_workspace=False,
    )
    return resharder._run(state_dict, out, progress, atomic, lambda: resharder._first_version)


class StateDictResharder(StaysHere):
    """Moves the tensors of state dicts that are alike again and again: what ranks agree on, they agree on once.

    Args and errors as in `reshard_state_dict`; ``keep_workspace`` keeps buffers and views between calls. Every call
    compares versions, and whether plain tensors are equal, while the tensors move; with ``versions=False`` (the same on
    every rank) calls have no version and are one small collective less, and plain tensors are compared in the
    constructor only. The constructor communicates, and so does every call; every rank of the group makes them in the
    same order.

    Attributes:
        plan: What is moved how.
    """

    _instead = "make another one, on every rank of the group"

    def __init__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        dst_layouts: DstLayouts = None,
        *,
        src_layouts: Mapping[str, LayoutLike] | None = None,
        shapes: Mapping[str, Any] | None = None,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        key_map: KeyMap | None = None,
        bucket_bytes: int = 64 * 2**20,
        group: dist.ProcessGroup | None = None,
        version: int | None = None,
        strict: bool = True,
        check: str = "first",
        keep_workspace: bool = True,
        versions: bool = True,
    ) -> None:
        self._versions = versions
        self._members = members_of(group)
        self._dst_layouts = dst_layouts
        try:
            tensors, targets = tensors_of(state_dict), tensors_of(out)
            facts = facts_of(tensors, targets, src_layouts or {}, shapes or {}, self._members)
        except Exception as error:
            tell(self._members, error)
        self.plan, self._first_version = agreed_plan(
            self._members, facts, tensors, dst_layouts, key_map, bucket_bytes, version, strict, versions
        )
        self._check, self._strict = check_mode(check), strict
        self._facts = facts
        self._keeps = keep_workspace
        self._seen: tuple[SeenState | None, SeenState | None] = None, None  # the tensors of the call before
        self._again: tuple[Arriving, list[Bucket]] | None = None  # what was made of them, where all are filled in place
        left_out = [name for name, to in (key_map or {}).items() if to is None]
        self._told = Told(self.plan, facts.sources, left_out, self._members)
        self._here = Here(self.plan, self._members.rank)
        self._movers = [
            mover_for_bucket(self._members, self.plan, bucket, check, keep_workspace) for bucket in self.plan.buckets
        ]

    def __call__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        *,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        version: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        atomic: bool = True,
    ) -> MovedStateDict:
        """Move tensors of the names, shapes, dtypes and layouts that the resharder was made for."""
        if torch.compiler.is_compiling():
            not_compiled("StateDictResharder")
        if not self._versions:
            if version is not None:
                hint = "make the resharder with versions=True"
                raise PlanError(Problem("no-versions", "version", found=f"{version} with versions=False", hint=hint))
            return self._run(state_dict, out, progress, atomic, lambda: None)
        # Under way while the tensors move.
        agreed = exchange_version(self._members, version, self._facts, tensors_of(state_dict))
        return self._run(state_dict, out, progress, atomic, agreed)

    def _local_parts(
        self, tensors: Mapping[str, Any], targets: Mapping[str, Any]
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], bool]:
        """The local parts of sources and destinations, and whether all are those of the call before."""
        sources, targets_seen = self._seen
        if sources is not None and targets_seen is not None and sources.same(tensors) and targets_seen.same(targets):
            return sources.locals, targets_seen.locals, True
        self._seen, self._again = (None, None), None
        return {name: local_tensor(value) for name, value in tensors.items()}, local_tensors(targets), False

    def _run(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        out: torch.nn.Module | Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
        atomic: bool,
        agreed_stamp: Callable[[], int | None],
    ) -> MovedStateDict:
        plan, members = self.plan, self._members
        tensors, targets = tensors_of(state_dict), tensors_of(out)
        device = device_of(tensors, targets, members)
        with torch.no_grad():
            sources, outs, known = self._local_parts(tensors, targets)
            again = self._again if known and not atomic else None
            arriving = again[0] if again else Arriving(self._here, None if atomic else outs, device)

            def out_problems() -> list[Problem]:
                return self._here.out_problems(outs, sources, atomic, self._strict)

            told = [] if known else self._told.problems(tensors, sources, targets)
            calls = again[1] if again else bucket_calls(self._here, sources, arriving)
            check_calls(self._here, members, self._movers, sources, arriving, calls, told, out_problems, self._check)
            if self._keeps and not known:
                self._seen = seen_state(tensors, sources), seen_state(targets, outs)
            self._again = (arriving, calls) if self._seen[1] is not None and arriving.all_in_place else None
            if out is not None and not atomic:
                stamp_version(out, None)  # neither the old state nor the new one, until everything has arrived
            move_buckets(self._here, self._movers, calls, arriving.fresh, progress)
            stamp = agreed_stamp()
            result = deliver(self._here, arriving, targets, outs, self._dst_layouts)
        result.plan, result.version = plan, stamp
        if out is not None and stamp is not None:
            stamp_version(out, stamp)
        return result


def state_version(out: torch.nn.Module | Mapping[str, Any]) -> int | None:
    """The version of the state that `reshard_state_dict` last brought into ``out`` completely; None without one."""
    found = out.get(VERSION_KEY) if isinstance(out, Mapping) else getattr(out, VERSION_KEY, None)
    return None if found is None else int(found)
