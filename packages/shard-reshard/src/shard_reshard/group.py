"""Process groups in the form used by planning, and the consensus of their ranks."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from shard_reshard._shared import consensus
from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard._torch_compat import is_fake

BEFORE_MOVING = "nothing was moved"
BEFORE_WRITING = "out stays as it was"
WHILE_WRITING = "out is filled in part"
_HINT = "call with the same shape, dtype, layouts and options on every rank of the group"


class GroupInfo(NamedTuple):
    """Properties of a process group used by planning."""

    # Weak: what is remembered by group would keep a destroyed one, whose threads then abort gloo's processes at exit.
    reference: weakref.ref[dist.ProcessGroup]
    rank: int  # of this process, in the group
    global_ranks: tuple[int, ...]  # of the members, in the order of the group
    size: int  # number of members

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, while it lives."""
        if (group := self.reference()) is None:
            raise refusal("no-process-group", "group", found="it was destroyed", hint="make this anew")
        return group

    def to_group(self, rank: int) -> int:
        """The group's number for a global rank."""
        if rank not in self.global_ranks:
            raise refusal(
                "rank-outside-mesh",
                "group",
                found=f"global rank {rank}, the group has the global ranks {list(self.global_ranks)}",
                hint="pass a group= that holds every rank of both layouts",
            )
        return self.global_ranks.index(rank)


def group_info(group: dist.ProcessGroup | None) -> GroupInfo:
    """Return the properties of ``group``; None is the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise refusal(
            "no-process-group",
            found="torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group first; plan_reshard and simulate need no process group",
        )
    untyped: Any = group  # callers are untyped
    if isinstance(untyped, str) or hasattr(untyped, "mesh_dim_names"):  # an axis, or a DeviceMesh
        raise refusal(
            "wrong-type",
            "group",
            found=f"{group!r:.100}",
            hint="pass a process group, as mesh.get_group('tp') returns it",
        )
    group = dist.group.WORLD if group is None else group
    # From the group itself: a group across several jobs has ranks outside of any default group.
    rank = group.rank() if isinstance(group, dist.ProcessGroup) else -1
    if rank < 0 or group is None:
        raise refusal(
            "rank-outside-mesh", "group", found="this process is not in the group", hint="call from members only"
        )
    return GroupInfo(weakref.ref(group), rank, tuple(dist.get_process_group_ranks(group)), group.size())


def data_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for ranks without tensors: the current GPU of a group that has them, or the CPU."""
    backends = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
    on_gpu = backends.get("cuda") not in (None, backends.get("cpu"))  # gloo alone is for tensors on the CPU
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def check_mode(check: str) -> str:
    """Return ``check`` if it is a valid mode."""
    if check not in ("first", "always"):
        raise refusal("invalid-argument", "check", found=repr(check), hint="'first' or 'always'")
    return check


def assert_consistent(
    members: GroupInfo, subject: str, lines: Sequence[str], problems: Sequence[Problem], state: str = BEFORE_MOVING
) -> None:
    """Raise one error on all ranks unless ``lines`` are equal and no rank has problems."""
    error = PlanError(condensed(problems)) if problems else None
    if not is_fake(()):
        consensus.assert_consistent(members.group, subject, lines, error, hint=_HINT, state=state)
    elif error is not None:  # fake tensors have no peers
        raise error


def raise_on_all_ranks(members: GroupInfo, error: Exception) -> NoReturn:
    """Raise ``error`` as one ``PlanError`` on all ranks, which wait for this rank's header."""
    joined = error if type(error) is PlanError else PlanError(consensus.problems_of(error))
    try:
        assert_consistent(members, "reshard", (), joined.problems)
    except PlanError as raised:
        raise raised from error
    raise joined from error


def all_gather_row(
    members: GroupInfo, topic: int, row: bytes, lines: Sequence[str], problems: Sequence[Problem] = ()
) -> list[bytes]:
    """Gather a row of at most 63 bytes of every rank, or raise on all. ``lines`` are the call, for that error.

    ``topic`` numbers calls, from 2 on: `assert_consistent` uses 0 and 1.
    """
    rows = consensus.all_gather_header(
        members.group, (b"\xff" if problems else bytes([topic])) + row, "reshard", BEFORE_MOVING
    )
    if any(other[0] != topic for other in rows):  # another call, or problems: all ranks raise
        consensus.raise_joined(
            members.group, "reshard", lines, PlanError(problems) if problems else None, hint=_HINT, state=BEFORE_MOVING
        )
    return [other[1:] for other in rows]


_ALIKE = 3  # problems of one cause that are listed one by one


def condensed(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return one problem for one cause: of 1,536 experts of a layer without a layout one line remains.

    Problems have one cause if code, hint and name are equal up to numbers: ``layers.0.mlp`` and ``layers.1.mlp``.
    """
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        key = problem.code, *(re.sub(r"\d+", "*", text) for text in (problem.name, problem.hint))
        groups.setdefault(key, []).append(problem)
    lines: list[Problem] = []
    for (_, pattern, _), alike in groups.items():
        if len(alike) <= _ALIKE:
            lines += alike
        else:
            lines.append(
                replace(
                    alike[0], name=pattern, found=f"{len(alike):,} of these, such as {alike[0].name}: {alike[0].found}"
                )
            )
    by_code: dict[str, int] = {}
    shown = []
    for line in lines:
        by_code[line.code] = by_code.get(line.code, 0) + 1
        if by_code[line.code] <= _LINES:
            shown.append(line)
    shown += [Problem(code, f"{count - _LINES} more like these") for code, count in by_code.items() if count > _LINES]
    return tuple(shown)


_LINES = 10  # of one code in an error
