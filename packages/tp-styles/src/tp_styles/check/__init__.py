"""The check by execution: sharded modules against their original forwards on full weights.

`checker.Checker.check` is the recipe: it records, runs both forwards of each region, compares, and reports. `runs`
executes one forward on detached copies, `compare` compares two of them, `report` holds verdicts and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Running:
    """A run of a check that is under way. Hooks of the check record their calls in it, and check nothing.

    Attributes:
        is_original: It runs originals on full weights: our own functions inside a forward then take full tensors.
        record: Called by each region's hook with the region and its arguments; None in a run that records nothing.
    """

    is_original: bool
    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


# The run under way, if there is one. No ContextVar: on a GPU a checkpoint runs forwards again in autograd's thread.
RUNNING: list[Running] = []


@contextmanager
def running(run: Running) -> Iterator[None]:
    """Declare a run for the block."""
    RUNNING.append(run)
    try:
        yield
    finally:
        RUNNING.pop()


def in_original() -> bool:
    """True while an original runs on full weights."""
    return bool(RUNNING) and RUNNING[-1].is_original
