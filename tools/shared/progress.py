"""A line on a terminal that names the phase of long work: tracing, checking, planning of a large model, loading."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Show = Callable[[str], None]
Item = TypeVar("Item")


@contextmanager
def phases(work: str, total: int = 0) -> Iterator[Show]:
    """Show `work [###.....] 3/8 phase, 12 s` on stderr while the body runs, and clear the line at its end.

    The line appears on rank 0 alone, and only if stderr is a terminal: a log file gets nothing. `SHARDWORKS_PROGRESS=0`
    silences it, `SHARDWORKS_PROGRESS=1` writes each phase as a line of its own, to a log too. Without `total` there is
    no bar.

    Args:
        work: What takes long, as `dp_partition.compile`.
        total: Number of phases, 0 if it is not known.

    Yields:
        A function that is called with the name of each phase when it begins.
    """
    setting, began, at = os.environ.get("SHARDWORKS_PROGRESS", ""), time.monotonic(), 0
    lines = setting == "1"
    shown = os.environ.get("RANK", "0") == "0" and setting != "0" and (lines or sys.stderr.isatty())

    def show(phase: str) -> None:
        nonlocal at
        at += 1
        if not shown:
            return
        done = 8 * (at - 1) // max(total, at)
        bar = f" [{'#' * done}{'.' * (8 - done)}] {at}/{total}" if total else ""
        text = f"{work}{bar}{phase and ' '}{phase}, {time.monotonic() - began:.0f} s"
        # A terminal's line is written over: return to its first column, and clear what a longer phase left there.
        sys.stderr.write(f"{text}\n" if lines else f"\r{text}\x1b[K")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if shown and not lines and at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def each_shown(
    work: str, items: Iterable[Item], total: int, name: Callable[[Item], str] = lambda _: ""
) -> Iterator[Item]:
    """Yield `items` one by one, each as a phase of `work` with the text `name(item)`, by default none."""
    with phases(work, total) as show:
        for item in items:
            show(name(item))
            yield item
