"""Makes one pytest outcome of the fates of all ranks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranktest.supervise import Member, Report


def judge(report: Report) -> None:
    """Return if every rank passed; else raise the one outcome that pytest shows.

    Raises:
        pytest.fail.Exception: a rank failed, died or was silent, or ranks disagree about skipping.
        pytest.skip.Exception: every rank skipped.
        pytest.xfail.Exception: every rank called `pytest.xfail`.
    """
    statuses = {member.outcome.status if member.outcome else "gone" for member in report.members}
    if statuses == {"passed"}:
        return
    reasons = {member.outcome.text for member in report.members if member.outcome}
    if statuses == {"skipped"}:
        pytest.skip("; ".join(sorted(reasons)))
    if statuses == {"xfailed"}:
        pytest.xfail("; ".join(sorted(reasons)))
    pytest.fail(describe(report), pytrace=False)


def describe(report: Report) -> str:
    """The text of a failure: a line for each rank, then tracebacks, stacks and outputs."""
    lines = [headline(report)]
    lines += [f"  rank {member.rank}: {fate(member)}" for member in report.members]
    for member in report.members:
        if member.outcome is not None and member.outcome.status == "failed":
            lines += ["", _rule(f"rank {member.rank}: traceback"), member.outcome.text]
        if member.outcome is None and member.stack:
            lines += ["", _rule(f"rank {member.rank}: stack"), trimmed(member.stack)]
    for member in report.members:
        if member.output.strip():
            lines += ["", _rule(f"rank {member.rank}: output"), member.output.rstrip()]
    return "\n".join(lines)


def headline(report: Report) -> str:
    """The first line of the text, which pytest's short summary shows: "rank 1 of 2 died: exit code 3"."""
    size = len(report.members)
    failed = [m for m in report.members if m.outcome is not None and m.outcome.status == "failed"]
    dead = [m for m in report.members if m.lost]
    if dead:
        return f"rank {dead[0].rank} of {size} died: {ending(dead[0].exit_code)}"
    if failed:
        assert failed[0].outcome is not None
        return f"rank {failed[0].rank} of {size}: {failed[0].outcome.summary}"
    silent = [m.rank for m in report.members if m.silent]
    if silent:
        return f"ranks {silent} of {size} did not finish in time ({report.seconds:.0f} s)"
    return f"ranks disagree: {[m.outcome.status for m in report.members if m.outcome]}"


def fate(member: Member) -> str:
    """One rank's fate in a line."""
    if member.lost:
        return f"died, {ending(member.exit_code)}"
    if member.outcome is None:
        return "silent: stack below, then killed"
    return f"{member.outcome.status}{': ' if member.outcome.summary else ''}{member.outcome.summary}"


def trimmed(stack: str) -> str:
    """A dumped stack without the frames that lead to the test body."""
    lines_left, skipping = [], False
    for line in stack.splitlines():
        if not line.startswith("  File"):
            skipping = False
        elif "ranktest/body.py" in line.replace(os.sep, "/"):
            skipping = True
        if not skipping and not line.startswith("Extension modules:"):
            lines_left.append(line)
    return "\n".join(lines_left).strip()


def ending(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "exit code unknown"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _rule(title: str) -> str:
    return f"{' ' + title + ' ':-^100}"
