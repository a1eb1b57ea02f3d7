"""Watches forked ranks: collects answers, gives the others 5 s after a failure, dumps stacks of ranks that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ranktest import process
from ranktest.activity import Rest
from ranktest.job import Outcome

#: Seconds that a test may take, whether its ranks work or rest.
LIMIT_S = 900.0
#: Seconds that the other ranks get after the first failure.
GRACE_S = 5.0
#: Seconds that a silent rank gets to write its stack.
STACK_S = 0.5

#: Waits for processes: (pids, seconds) -> how each ended, None if it did not.
Reap = Callable[[list[int], float], dict[int, "int | None"]]


@dataclass
class Member:
    """The fate of one rank: its answer, or how it ended."""

    rank: int
    outcome: Outcome | None = None
    lost: bool = False  # closed its socket without an answer
    silent: bool = False  # rested too long, or did not answer within the limit
    exit_code: int | None = None
    stack: str = ""
    output: str = ""

    @property
    def failed(self) -> bool:
        """True once the test cannot pass any more."""
        return self.lost or (self.outcome is not None and self.outcome.status == "failed")


@dataclass
class Report:
    """The fates of all ranks of a job."""

    members: list[Member]
    seconds: float = 0.0


@dataclass
class Child:
    """A rank that this process or the server has forked."""

    member: Member
    pid: int
    channel: Connection


def watch(children: list[Child], folder: Path, rest_s: float, reap: Reap) -> None:
    """Wait until forked ranks have answered, or have all rested for `rest_s`; then end them and fill their `member`."""
    try:
        _collect(children, rest_s)
        _dump_silent(children)
    finally:
        _end(children, reap)
        for child in children:
            _read(child.member, folder)


def _collect(children: list[Child], rest_s: float) -> None:
    failed, deadline, rest = False, time.monotonic() + LIMIT_S, Rest(rest_s)
    waiting = {child.channel: child for child in children}
    while waiting:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0 or rest.is_over([child.pid for child in waiting.values()]):
            return
        for channel in wait(list(waiting), min(seconds_left, rest.sample_s)):
            assert isinstance(channel, Connection)
            child = waiting.pop(channel)
            try:
                child.member.outcome = child.channel.recv()
            except (EOFError, OSError):
                child.member.lost = True
        if not failed and any(child.member.failed for child in children):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _dump_silent(children: list[Child]) -> None:
    silent = [child for child in children if child.member.outcome is None and not child.member.lost]
    for child in silent:
        child.member.silent = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    if silent:
        time.sleep(STACK_S)


def _end(children: list[Child], reap: Reap) -> None:
    for child in children:
        if child.member.outcome is None and not child.member.lost:
            process.kill(child.pid)
        else:
            with contextlib.suppress(OSError):
                child.channel.send("leave")
    ended = reap([child.pid for child in children], 3.0)
    running = [pid for pid, code in ended.items() if code is None]
    for pid in running:
        process.kill(pid)
    if running:
        ended.update(reap(running, 3.0))
    for child in children:
        child.member.exit_code = ended[child.pid]
        process.kill(child.pid)
        child.channel.close()


def _read(member: Member, folder: Path) -> None:
    for kind in ("stack", "output"):
        file = folder / f"{member.rank}.{kind}"
        if file.exists():
            setattr(member, kind, file.read_text(errors="replace"))


def reap_own(pids: list[int], timeout_s: float) -> dict[int, int | None]:
    """Wait for children of this process; returns exit codes by process id."""
    deadline = time.monotonic() + timeout_s
    ended: dict[int, int | None] = dict.fromkeys(pids)
    while True:
        for pid, code in ended.items():
            if code is None:
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        if None not in ended.values() or time.monotonic() > deadline:
            return ended
        time.sleep(0.001)
