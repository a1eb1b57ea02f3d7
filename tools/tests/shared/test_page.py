"""Text on a page is escaped, and wide parts scroll."""

from __future__ import annotations

from shared import page


def test_a_page_escapes_and_scrolls() -> None:
    bars = page.stacked_bars("memory", [("rank <0>", [("weights", 2048), ("none", 0)])], {"weights": "#123456"})
    text = page.page("<plan>", [page.note("a & b"), page.cards([("1", "x")]), page.table(["n"], [["1"]], [0]), bars])
    assert "&lt;plan&gt;" in text
    assert "a &amp; b" in text
    assert "rank &lt;0&gt;" in text
    assert text.count('class="scroll"') == 2
    assert "2.00 KiB" in text
    assert "http" not in text.replace("http-equiv", "")
