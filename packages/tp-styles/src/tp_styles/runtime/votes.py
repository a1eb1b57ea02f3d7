"""Votes before collectives: in an attempt the error of one rank is raised by all, and none waits for the others.

A rank that raises between two collectives would leave its peers in the next one until the group's timeout. So in an
attempt the ranks exchange 64 bytes before each collective of their group, and at the end: the collective that a rank
is about to make, or that it has raised. After votes that differ no rank goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from tp_styles._shared.consensus import all_gather_header
from tp_styles._torch_compat import without_dispatch_modes

GOING, ENDED, RAISED = range(3)


class PeerRaised(BaseException):
    """Ends an attempt on a rank whose peers raised, or made another collective. No `except Exception` catches it."""


@dataclass
class Votes:
    """The votes of one attempt.

    Attributes:
        group: The ranks.
        is_over: A vote differed between the ranks: no other one follows.
        collective: The collective that this rank voted for last, `""` after its vote for the end.
    """

    group: dist.ProcessGroup
    is_over: bool = False
    collective: str = ""

    def go_on(self, collective: str) -> None:
        """Vote for a collective.

        Raises:
            PeerRaised: Another rank raised, ended, or is about to make another collective.
        """
        self.collective = collective
        if self.is_over or not self._agree(GOING):
            raise PeerRaised(collective)

    def end(self, *, raised: bool) -> bool:
        """Vote for the end of the attempt; return True if it ended without an error on every rank."""
        if self.is_over:
            return False
        self.collective = ""
        return self._agree(RAISED if raised else ENDED) and not raised

    def _agree(self, vote: int) -> bool:
        payload = bytes([vote]) + hashlib.sha256(self.collective.encode()).digest()
        with without_dispatch_modes():
            headers = all_gather_header(self.group, payload, "the check")
        self.is_over = len(set(headers)) > 1
        return not self.is_over


# Votes of the attempts under way, the innermost last; None where the ranks exchange without votes.
_VOTES: list[Votes | None] = []


@contextmanager
def voting(votes: Votes | None) -> Iterator[None]:
    """Vote before each collective of the block."""
    _VOTES.append(votes)
    try:
        yield
    finally:
        _VOTES.pop()


def before_collective(group: dist.ProcessGroup, collective: str) -> None:
    """Vote for a collective of all ranks of an attempt, if one is under way.

    Raises:
        PeerRaised: Not all ranks make it.
    """
    votes = _VOTES[-1] if _VOTES else None
    if votes is None:
        return
    voters, members = (dist.get_process_group_ranks(item) for item in (votes.group, group))
    if set(voters) <= set(members):  # ranks of a smaller group may make it without the others
        votes.go_on(f"{collective} over {len(members)} ranks")
