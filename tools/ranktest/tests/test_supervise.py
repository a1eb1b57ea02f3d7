"""Ranks at work are not ended, however long they take; ranks that rest are, and any rank at the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from ranktest import activity, process, supervise
from ranktest.job import Outcome
from ranktest.supervise import Child, Member

REST_S = 2.0


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def wait_for_a_compiler(seconds: float) -> None:
    subprocess.run(
        [sys.executable, "-c", f"import time\ne = time.monotonic() + {seconds}\nwhile time.monotonic() < e: pass"]
    )


def watched(folder: Path, *bodies: Callable[[], object]) -> tuple[list[Member], float]:
    """Fork a rank for each body and watch them; returns what became of each, and the seconds it took."""
    children = []
    for rank, body in enumerate(bodies):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            process.lead_group()
            try:
                body()
                theirs.send(Outcome(rank, "passed"))
                theirs.recv()  # "leave"
            finally:
                os._exit(0)
        theirs.close()
        children.append(Child(Member(rank), pid, ours))
    start = time.monotonic()
    supervise.watch(children, folder, REST_S, supervise.reap_own)
    return [child.member for child in children], time.monotonic() - start


@pytest.mark.parametrize("work", [spin, wait_for_a_compiler])
def test_a_busy_rank_is_not_ended_nor_one_that_waits_for_it(tmp_path: Path, work: Callable[[float], None]) -> None:
    members, seconds = watched(tmp_path, lambda: work(4 * REST_S), lambda: time.sleep(4 * REST_S))
    assert [member.outcome and member.outcome.status for member in members] == ["passed", "passed"]
    assert seconds > 3 * REST_S


def test_ranks_that_sleep_are_ended(tmp_path: Path) -> None:
    members, seconds = watched(tmp_path, lambda: time.sleep(300), lambda: time.sleep(300), lambda: None)
    assert [member.silent for member in members] == [True, True, False]
    assert [member.exit_code for member in members[:2]] != [0, 0]
    assert REST_S <= seconds < 60


def test_a_rank_that_never_rests_is_ended_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LIMIT_S", 2 * REST_S)
    members, seconds = watched(tmp_path, lambda: spin(300))
    assert members[0].silent
    assert 2 * REST_S <= seconds < 60


@pytest.mark.parametrize(("last", "is_over"), [(35.0, False), (1.0, True)])
def test_what_an_ended_helper_waited_is_not_taken_from_its_rank(
    monkeypatch: pytest.MonkeyPatch, last: float, is_over: bool
) -> None:
    """On a busy machine a compiler waits for minutes; the next one starts from nothing."""
    waits = [{8: 200.0}, {8: 200.5}, {9: 0.5}, {9: 0.6}, {9: last}]
    samples = [{7: (1.0, 90.0 * at)} | {pid: (s / 5, s) for pid, s in each.items()} for at, each in enumerate(waits)]
    monkeypatch.setattr(activity, "core_seconds", lambda leader: samples.pop(0))  # 7 wakes up, waits, and does nothing
    rest = activity.Rest(60.0)
    monkeypatch.setattr(rest, "sample_s", 0.0)
    assert [rest.is_over([7]) for _ in range(5)] == [False] * 4 + [is_over]


def test_a_rank_that_waited_for_another_may_rest_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {7: iter([0.0, 9.0, 18.0, 27.0]), 8: iter([0.0] * 9)}
    monkeypatch.setattr(activity, "core_seconds", lambda leader: {leader: (next(spent[leader]), 0.0)})
    rest = activity.Rest(60.0)
    monkeypatch.setattr(rest, "sample_s", 0.0)
    assert [rest.is_over([7, 8]) for _ in range(4)] == [False] * 4
    assert [rest.is_over([8]) for _ in range(4)] == [False] * 3 + [True]
