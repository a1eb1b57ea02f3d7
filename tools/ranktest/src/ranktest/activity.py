"""Tells when ranks hang: they hang when all of them rest, not when a clock says so.

On a busy machine a test takes many times as long, with all ranks at work. A rank works as long as it, or a helper that
it started (a compiler), uses a core or waits for one: Linux counts both in `/proc`. Elsewhere every rank seems to rest.
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
#: Waits count up to so many times the core seconds: threads of a library that wake up for nothing wait as well.
MOST_WAITS = 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Rest:
    """Tells when all ranks that are left have rested for `window_s`: while one works, the others wait for it."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.sample_s = window_s / SAMPLES
        self.before: dict[int, tuple[float, float]] | None = None  # process -> its seconds at the last sample
        self.worked: deque[float] = deque(maxlen=SAMPLES)  # seconds of the busiest rank between two samples
        self.next_at = 0.0

    def is_over(self, leaders: list[int]) -> bool:
        """Take a sample where it is time for one; `leaders` lead the process groups of the ranks that are left."""
        now = time.monotonic()
        if now < self.next_at:
            return False
        self.next_at = now + self.sample_s
        processes = [core_seconds(leader) for leader in leaders]
        if self.before is not None:
            # Seconds are compared process by process: the total of a rank sinks when its compiler ends, and the rank
            # must not seem to rest. The busiest rank counts, also one that has ended since: those that waited for it
            # start to rest only now.
            before, gained = self.before, [0.0]
            for own in processes:
                pairs = [(now, before.get(pid, (0.0, 0.0))) for pid, now in own.items()]
                used = [(max(0.0, now[0] - then[0]), max(0.0, now[1] - then[1])) for now, then in pairs]
                gained.append(sum(core + min(waited, MOST_WAITS * core) for core, waited in used))
            self.worked.append(max(gained))
        self.before = {pid: seconds for own in processes for pid, seconds in own.items()}
        return len(self.worked) == SAMPLES and sum(self.worked) < LEAST_SHARE * self.window_s


def core_seconds(leader: int) -> dict[int, tuple[float, float]]:
    """Seconds that each process of a group has used a core, and waited for one; none where there is no `/proc`."""
    seconds = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                # Fields 11 to 14: seconds of the process and its ended children. schedstat: how long a thread waited.
                waits = [(task / "schedstat").read_text().split()[1] for task in (folder / "task").iterdir()]
                seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS_PER_S, sum(map(int, waits)) / 1e9
    return seconds
