"""Agreement: ranks compare what they are about to do before the first byte of data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shard_reshard._torch_compat import is_fake
from shard_reshard.members import Members
from shard_reshard.problems import PlanError, Problem
from shard_reshard.rows import Topic, exchange_rows

CHECKS = ("first", "always")

_TOLD = "shard_reshard_all_ranks_raise_it"  # attribute of an error
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def check_mode(check: str) -> str:
    """``check`` if it is one of the modes there are."""
    if check not in CHECKS:
        raise PlanError(Problem("bad-check", "check", found=repr(check), hint="'first' or 'always'"))
    return check


def agree(members: Members, facts: str, problems: Sequence[Problem], check: str = "first") -> None:
    """Return on all ranks, or raise the same error on all.

    Args:
        members: The group; every member calls this.
        facts: What has to be the same on every rank, as text.
        problems: What is wrong on this rank; then no rank goes on.
        check: "first": facts that this group has agreed on before need no communication; problems are then raised
            on this rank only. "always": compare.

    Raises:
        PlanError: The problems of all ranks; ``ranks-disagree`` with what each said where facts differ.
    """
    if is_fake(()):  # fake tensors have no other ranks
        if problems:
            raise PlanError(problems)
        return
    digest = hashlib.sha256(facts.encode())
    agreed = _agreed.setdefault(members.group, set())
    if check == "first" and digest.hexdigest() in agreed:
        if problems:
            raise PlanError(problems)  # the others are past comparing
        return
    rows = exchange_rows(members, Topic.CALL, bytes([len(problems) > 0]) + digest.digest())()
    if rows is not None and len(set(rows)) == 1 and not rows[0][0]:
        agreed.add(digest.hexdigest())
        return
    raise_together(members, facts, problems)


def tell(members: Members, error: Exception) -> NoReturn:
    """Raise ``error`` on all ranks, which wait for this one's row; or as it is, where all have raised it already."""
    if not getattr(error, _TOLD, False):
        agree(members, "", problems_of(error), "always")
    raise error


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """An error as problems that other ranks can be told: whatever keeps one rank from going on must stop them all."""
    if isinstance(error, PlanError):
        return error.problems
    found = f"{type(error).__name__}: {error}"
    return (Problem("bad-argument", found=found, hint="see the error that this one was raised after"),)


def raise_together(members: Members, facts: str, problems: Sequence[Problem]) -> NoReturn:
    """Raise one error on all ranks, with the problems of each and what each said; every member calls this."""
    said: list[Any] = [None] * members.size
    dist.all_gather_object(said, (facts, tuple(problems)), group=members.group)
    found: list[Problem] = []
    for theirs in (problem for _, listed in said for problem in listed):
        if theirs not in found:
            found.append(theirs)
    groups: dict[str, list[int]] = {}
    for rank, (text, listed) in enumerate(said):
        if not listed:
            groups.setdefault(text, []).append(rank)
    if len(groups) > 1:
        for text, ranks in groups.items():
            who = f"ranks {', '.join(map(str, ranks))} say {text}"
            hint = "call with the same shape, dtype, layouts and options on every rank of the group"
            found.append(Problem("ranks-disagree", found=who, hint=hint))
    error = PlanError(found, "nothing was moved: found before the exchange, the same on every rank")
    setattr(error, _TOLD, True)
    raise error
