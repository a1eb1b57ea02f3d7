"""Marks of benchmark tables: met, missed, or none where a target is no number."""

from __future__ import annotations

import json

import docs_hooks
import pytest


@pytest.mark.parametrize(
    ("target", "measured", "expected"),
    [
        ("<= 1.35x", "1.50x", "**missed**"),
        ("<= 1.35x", "1.31x", "met"),
        (">= 9x", "9.1x (min 8.0x)", "met"),
        ("< 1.00x", "0.92x (min 0.94x): 73.2 ms", "met"),
        ("<= 60 us", "34 us with out=, 42 us into a fresh tensor", "met"),
        ("<= 5 s", "2.19 s (least of 3: 1.96)", "met"),
        ("<= 5 s", "0.3 ms", "met"),
        (">= 1,000, all equal", "1,200 of 1,200 equal", "met"),
        ("< 2 s", "2173.1 ms", "**missed**"),
        ("<= the peer's", "20.6 MiB", ""),
        ("-", "36.7 s", ""),
        ("under 0.3 s beyond torch", "median 52 ms", ""),
    ],
)
def test_verdicts(target: str, measured: str, expected: str) -> None:
    assert docs_hooks.verdict(target, measured) == expected


def test_plots_come_first_and_tables_keep_their_cells() -> None:
    page = (
        "# B\n\n## T\n\n| what | target | measured | peer |\n|---|---|---|---|\n| a | <= 2x | 3x | p |\n\n![P](p.svg)\n"
    )
    wanted = "# B\n\n![P](p.svg)\n\n## T\n\n| what | target | measured | peer | |\n|---|---|---|---|---|\n"
    assert docs_hooks.plots_first(docs_hooks.marked(page)).startswith(wanted + "| a | <= 2x | 3x | p | **missed** |\n")


def test_a_notebook_becomes_a_page_with_its_output() -> None:
    printed = {"name": "stdout", "text": ["3\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": [printed, {"name": "stderr", "text": ["warned"]}]},
    ]
    page = docs_hooks.notebook_page(json.dumps({"cells": cells}))
    assert page == "# Title\ntext\n\n```python\nprint(3)\n```\n\n```text\n3\n```\n"


def test_pages_lose_sphinx_roles_and_links_to_themselves() -> None:
    own = "<p>More: <code>docs/packages/tp-styles.md</code> in the repository.</p>"
    page = f"<p>:meth:<code>validate</code> lists</p>{own}"
    assert docs_hooks.on_page_content(page) == "<p><code>validate</code> lists</p>"
