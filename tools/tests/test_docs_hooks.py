"""Pages of the site: plots first, notebooks with their output, no Sphinx roles."""

from __future__ import annotations

import json

import docs_hooks


def test_plots_come_before_the_first_section() -> None:
    page = "# B\n\n## T\n\n| what |\n|---|\n| a |\n\n![P](p.svg)\n"
    assert docs_hooks.plots_first(page).startswith("# B\n\n![P](p.svg)\n\n## T\n\n| what |\n|---|\n| a |\n")


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
