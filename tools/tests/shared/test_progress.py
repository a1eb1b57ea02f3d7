"""The line of progress: a terminal sees each phase, a log file nothing unless it asks."""

from __future__ import annotations

import io
import sys

import pytest
from shared.progress import each_shown, phases


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, total: int = 3, **variables: str) -> str:
    for name in ("RANK", "SHARDWORKS_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    with phases("compile", total) as at:
        for phase in ("trace", "place", "check"):
            at(phase)
    return stream.getvalue()


def test_a_terminal_sees_each_phase_in_one_line_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert [part.split(", ")[0] for part in text.split("\r")[1:-1]] == [
        "compile [........] 1/3 trace",
        "compile [##......] 2/3 place",
        "compile [#####...] 3/3 check",
    ]
    assert text.endswith("\r\x1b[K") and "\n" not in text


def test_a_log_and_other_ranks_see_nothing_unless_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch) == ""
    assert shown(Terminal(), monkeypatch, RANK="1") == ""
    assert shown(Terminal(), monkeypatch, SHARDWORKS_PROGRESS="0") == ""
    lines = shown(io.StringIO(), monkeypatch, total=0, SHARDWORKS_PROGRESS="1").splitlines()
    assert [line.split(",")[0] for line in lines] == ["compile trace", "compile place", "compile check"]


def test_the_line_is_cleared_when_the_work_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SHARDWORKS_PROGRESS", raising=False)

    def load() -> None:
        with phases("load") as at:
            at("read")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        load()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_items_are_yielded_in_order_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SHARDWORKS_PROGRESS", "1")
    assert list(each_shown("search", [3, 1, 2], 3, lambda item: f"mesh {item}")) == [3, 1, 2]
    lines = [line.split(",")[0] for line in stream.getvalue().splitlines()]
    assert lines == ["search [........] 1/3 mesh 3", "search [##......] 2/3 mesh 1", "search [#####...] 3/3 mesh 2"]
