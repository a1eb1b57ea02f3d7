"""Values that travel between the pytest process, the server and the ranks: job, meeting point, outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The device of ranks and the backend of their group.

    Attributes:
        device: "cpu" or "cuda".
        backend: what `init_process_group` gets ("gloo", "nccl", "cpu:gloo,cuda:nccl").
        ranks_per_gpu: how many ranks share one device.
    """

    device: str = "cpu"
    backend: str = "gloo"
    ranks_per_gpu: int = 1


@dataclass(frozen=True)
class Job:
    """One test body on `world_size` ranks.

    `funcargs` is a pickle of the fixture values: it is opened in the rank only after the test module is imported,
    because it may hold objects of classes defined there. `debugger` is a rank and the port of this machine on which
    that rank waits for a debugger before its body starts.
    """

    nodeid: str
    path: str
    qualname: tuple[str, ...]
    funcargs: bytes
    ranks_argument: bool
    world_size: int
    seed: int
    rest_s: float
    filterwarnings: tuple[str, ...]
    folder: str
    tbstyle: str = "auto"
    placement: Placement = Placement()
    debugger: tuple[int, int] | None = None


@dataclass(frozen=True)
class Meeting:
    """The meeting point of one rank with the others of its test.

    Attributes:
        rank: number in the default group; decides the device.
        port: port of the store, on this machine.
        listen_fd: an open listening socket, on the rank that serves the store; None on the others.
    """

    rank: int
    port: int
    listen_fd: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The answer of one rank about its run of the body."""

    rank: int
    status: str  # "passed", "failed", "skipped", "xfailed"
    text: str = ""  # traceback, or the reason
    summary: str = ""  # one line
    imported: tuple[str, ...] = ()  # modules that the body was the first to import
