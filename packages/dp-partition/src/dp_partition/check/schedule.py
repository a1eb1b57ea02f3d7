"""Choose the calls that are checked: the same ones on every rank, without communication between them."""

from __future__ import annotations

import random

LAST = 1024
NEVER = 0


class CheckSchedule:
    """Call numbers to check: 1, 2, then one drawn from each [2^k, 2^(k+1)) up to 1,024.

    Drawn numbers and not powers of two: those would never meet ``step % 10``.

    Args:
        mode: ``"sampled"``, ``"first"`` (calls 1 and 2) or ``"never"``.

    Attributes:
        calls: Number of calls so far, failed ones included, so that all ranks count alike.
        next: Number of the next call to check; 0: none.
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.seed, self.calls = mode, 0, 0
        self.next = NEVER if mode == "never" else 1

    def is_due(self) -> bool:
        """Count a call; true if it is to be checked. This compare is all that an unchecked call pays."""
        self.calls += 1
        return 0 < self.next <= self.calls  # `<`: the call that was due failed before it could be checked

    def advance(self, *, again: bool = False) -> None:
        """Choose the next call to check.

        Args:
            again: Check the very next call: some rank has a graph that no check has seen.
        """
        done = self.calls
        if again or done == 1:
            self.next = done + 1
        elif self.mode == "first" or done >= LAST // 2:
            self.next = NEVER
        else:
            self.next = self._drawn(max(2, done.bit_length()))

    def _drawn(self, power: int) -> int:
        return random.Random(f"{self.seed}:{power}").randrange(1 << power, 1 << (power + 1))


__all__ = ["CheckSchedule"]
