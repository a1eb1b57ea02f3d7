"""Outcomes of planning on one rank, and the exchange after which all ranks act or all raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from shard_spec._shared.consensus import assert_consistent, problems_of
from shard_spec._shared.problems import PlanError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class RankState:
    """Result of planning on one rank.

    Attributes:
        lines: Facts about what it is about to do; they have to be equal on every rank.
        problems: What keeps it from going on.
    """

    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that was passed, or the default group.

    Raises:
        PlanError: ``no-process-group`` or ``rank-outside-mesh``; no other rank can be told.
    """
    if not (dist.is_available() and dist.is_initialized()):
        found = "torch.distributed is not initialized"
        hint = "call torch.distributed.init_process_group first; planning needs no process group"
        raise PlanError(Problem("no-process-group", found=found, hint=hint))
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        found = f"rank {dist.get_rank()} is not in the process group it passed"
        raise PlanError(Problem("rank-outside-mesh", "process_group", found=found, hint="call it on members only"))
    return group


def capture_errors(work: Callable[[], T]) -> tuple[T | None, tuple[Problem, ...]]:
    """Return the value of ``work``, or its problems, so that a failing rank still meets its peers."""
    try:
        return work(), ()
    except Exception as error:
        return None, problems_of(error)


def raise_on_all_ranks(group: dist.ProcessGroup, state: RankState, subject: str) -> None:
    """Return when no rank found a problem and all are about to do the same; a collective.

    Raises:
        PlanError: The same on every rank: the problems of all ranks, or ``ranks-disagree`` with the lines that differ.
    """
    error = PlanError(state.problems) if state.problems else None
    assert_consistent(group, subject, state.lines, error, hint="pass the same to every rank of the group")
