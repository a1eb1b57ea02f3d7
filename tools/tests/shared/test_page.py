"""Text on a page is escaped, and wide parts scroll."""

from __future__ import annotations

from shared.page import human_bytes, page_parts


def test_a_page_escapes_and_scrolls() -> None:
    html, rows = page_parts(), [("rank <0>", [("weights", 2048), ("none", 0)]), ("rank 1", [])]
    bars = html.stacked_bars("memory", rows, {"weights": "#123456"}, human_bytes)
    text = str(html.page("<plan>", [html.note(["a & b"]), html.cards([("1", "x")]), html.table("n", [["<1>"]]), bars]))
    assert "&lt;plan&gt;" in text
    assert "a &amp; b" in text
    assert "rank &lt;0&gt;" in text
    assert "<code>&lt;1&gt;</code>" in text
    assert text.count('class="scroll"') == 2
    assert text.count("2.00 KiB") == 3  # under the pointer, in the bar, at its end
    assert '"#123456"' in text
    assert "http" not in text
