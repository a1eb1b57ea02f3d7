"""Agreeing before anything moves: the ranks compare what they are about to do, and raise together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from shard_spec.problems import PlanError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What one rank found: the lines that describe what it is about to do, and what is wrong."""

    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the lines."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that was passed, or the default group.

    Raises:
        PlanError: ``no-process-group`` or ``rank-outside-group``; no other rank can be told.
    """
    if not (dist.is_available() and dist.is_initialized()):
        found = "torch.distributed is not initialized"
        hint = "call torch.distributed.init_process_group first; planning needs no process group"
        raise PlanError(Problem("no-process-group", found=found, hint=hint))
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        found = f"rank {dist.get_rank()} is not in the process group it passed"
        raise PlanError(Problem("rank-outside-group", "process_group", found=found, hint="call it on members only"))
    return group


def attempt(work: Callable[[], T]) -> tuple[T | None, tuple[Problem, ...]]:
    """What ``work`` returns, or why it could not: so that a rank with an error still meets the others."""
    try:
        return work(), ()
    except PlanError as error:
        return None, error.problems
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return None, (Problem("failed", found=found, hint="see the traceback of that rank"),)


def agree(group: dist.ProcessGroup, outcome: Outcome, what: str) -> None:
    """Return when no rank found a problem and all are about to do the same; a collective.

    Raises:
        PlanError: The same on every rank: all problems of all ranks; or ``ranks-disagree`` with what differs.
    """
    size = dist.get_world_size(group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, (outcome.digest, outcome.problems), group=group)
    digests = [digest for digest, _ in gathered]
    problems = [found for _, found in gathered]
    if any(problems):
        raise PlanError(_joined(problems), f"{what}: nothing was changed")
    if len(set(digests)) == 1:
        return
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, outcome.lines, group=group)
    raise PlanError(_differences(everything), f"{what}: the ranks do not agree, nothing was changed")


def _joined(by_rank: Sequence[tuple[Problem, ...]]) -> list[Problem]:
    """All ranks' problems, each once; those that only some ranks have say which."""
    ranks_of: dict[Problem, list[int]] = {}
    for rank, problems in enumerate(by_rank):
        for problem in dict.fromkeys(problems):
            ranks_of.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == len(by_rank) else replace(problem, found=f"on rank {_list(ranks)}: {problem.found}")
        for problem, ranks in ranks_of.items()
    ]


def _differences(by_rank: Sequence[tuple[str, ...]]) -> list[Problem]:
    """For the first lines that differ, who has what."""
    problems: list[Problem] = []
    for lines in zip(*(list(lines) + [""] * (max(map(len, by_rank)) - len(lines)) for lines in by_rank), strict=True):
        if len(set(lines)) > 1 and len(problems) < 5:
            holders = {line: [rank for rank, other in enumerate(lines) if other == line] for line in lines}
            found = "; ".join(f"rank {_list(ranks)}: {line or 'nothing'}" for line, ranks in holders.items())
            problems.append(Problem("ranks-disagree", found=found, hint="pass the same to every rank of the group"))
    return problems


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
