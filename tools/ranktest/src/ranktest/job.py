"""What the pytest process asks the ranks to run, and what each rank answers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One test body on `world_size` ranks.

    `funcargs` is a pickle of the fixture values: it is opened in the rank only after the test module is imported,
    because it may hold objects of classes defined there.
    """

    nodeid: str
    path: str
    qualname: tuple[str, ...]
    funcargs: bytes
    ranks_argument: bool
    world_size: int
    seed: int
    timeout_s: float
    group_timeout_s: float
    filterwarnings: tuple[str, ...]
    folder: str
    tbstyle: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What one rank says about its run of the body."""

    rank: int
    status: str  # "passed", "failed", "skipped", "xfailed"
    text: str = ""  # traceback, or the reason
    summary: str = ""  # one line
    warnings: tuple[str, ...] = field(default=())
