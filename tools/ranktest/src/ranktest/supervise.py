"""Watching forked ranks: collect answers, give the others 5 s after the first failure, dump those that hang."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ranktest import process, wire
from ranktest.activity import Rest
from ranktest.job import Outcome

#: How long a test may take, at work or not.
LIMIT_S = 900.0
#: How long the other ranks get after the first failure.
GRACE_S = 5.0
#: How long a silent rank gets to write its stack.
STACK_S = 0.5

#: Waits for processes: (pids, seconds) -> how each ended, None if it did not.
Reap = Callable[[list[int], float], dict[int, "int | None"]]


@dataclass
class Member:
    """What became of one rank."""

    rank: int
    outcome: Outcome | None = None
    lost: bool = False  # closed its socket without an answer
    silent: bool = False  # rested too long, or did not answer within the limit
    exit_code: int | None = None
    stack: str = ""
    output: str = ""

    @property
    def failed(self) -> bool:
        """Whether the test cannot pass any more."""
        return self.lost or (self.outcome is not None and self.outcome.status == "failed")


@dataclass
class Report:
    """What became of all ranks of a job."""

    members: list[Member]
    seconds: float = 0.0
    kept: list[str] = field(default_factory=list)  # files left for the reader

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the ranks that answered."""
        return [member.outcome for member in self.members if member.outcome is not None]


@dataclass
class Child:
    """A forked rank of this process's making."""

    member: Member
    pid: int
    channel: socket.socket


def watch(children: list[Child], folder: Path, rest_s: float, reap: Reap) -> None:
    """See forked ranks through to their end, `rest_s` after the last one was at work; fills their `member`."""
    try:
        _collect(children, rest_s)
        _dump_silent(children)
    finally:
        _end(children, reap)
        for child in children:
            _read(child.member, folder)


def _collect(children: list[Child], rest_s: float) -> None:
    failed, deadline, rest = False, time.monotonic() + LIMIT_S, Rest(rest_s)
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.channel, selectors.EVENT_READ, child)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 or rest.is_over([key.data.pid for key in selector.get_map().values()]):
                return
            for key, _ in selector.select(min(left, rest.sample_s)):
                child = key.data
                try:
                    child.member.outcome = wire.receive(child.channel)
                except EOFError:
                    child.member.lost = True
                selector.unregister(child.channel)
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
                wire.send(child.channel, "leave")
    ended = reap([child.pid for child in children], 3.0)
    left = [pid for pid, code in ended.items() if code is None]
    for pid in left:
        process.kill(pid)
    if left:
        ended.update(reap(left, 3.0))
    for child in children:
        child.member.exit_code = ended[child.pid]
        process.kill_helpers(child.pid)
        child.channel.close()


def _read(member: Member, folder: Path) -> None:
    for kind in ("stack", "output"):
        file = folder / f"{member.rank}.{kind}"
        if file.exists():
            setattr(member, kind, file.read_text(errors="replace"))


def clear(folder: Path) -> list[str]:
    """Remove a job's folder, unless it holds flight-recorder dumps; returns those."""
    kept = [str(file) for file in folder.glob("nccl_trace_rank_*")]
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    return kept


def reap_own(pids: list[int], timeout_s: float) -> dict[int, int | None]:
    """Wait for children of this process."""
    deadline = time.monotonic() + timeout_s
    ended: dict[int, int | None] = dict.fromkeys(pids)
    while True:
        for pid, code in ended.items():
            if code is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        if None not in ended.values() or time.monotonic() > deadline:
            return ended
        time.sleep(0.001)
