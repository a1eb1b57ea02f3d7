"""Which ranks are at work: a rank hangs when it rests, not when a clock says so.

On a busy machine a test takes many times as long, with all ranks at work. What counts is how long a rank used a core or
waited for one, with the helpers that it started (a compiler): Linux has both in `/proc`. Elsewhere every rank seems to
rest.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

#: A rank rests below this share of a core.
LEAST_SHARE = 0.05
#: How often a window is looked at.
SAMPLES = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Rest:
    """Tells when all ranks that are left have rested for `window_s`: while one works, the others wait for it."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.sample_s = window_s / SAMPLES
        self.samples: deque[dict[int, float]] = deque(maxlen=SAMPLES + 1)
        self.next_at = 0.0

    def is_over(self, leaders: list[int]) -> bool:
        """Take a sample where it is time for one; `leaders` lead the process groups of the ranks that are left."""
        now = time.monotonic()
        if now < self.next_at:
            return False
        self.next_at = now + self.sample_s
        seconds = {leader: core_seconds(leader) for leader in leaders}
        self.samples.append(seconds)
        if len(self.samples) <= SAMPLES:
            return False
        before = self.samples[0]
        return all(seconds[leader] - before.get(leader, 0.0) < LEAST_SHARE * self.window_s for leader in leaders)


def core_seconds(leader: int) -> float:
    """Seconds that the processes of a group have used a core or waited for one; 0 where there is no `/proc`."""
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                total += sum(map(int, fields[11:15])) / TICKS_PER_S  # its own, and of its children that have ended
                waits = [(task / "schedstat").read_text().split()[1] for task in (folder / "task").iterdir()]
                total += sum(map(int, waits)) / 1e9
    return total
