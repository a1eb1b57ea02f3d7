"""Pages of the site: notebooks with their output, no Sphinx roles, nothing wider than a window."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import check_docs
import docs_hooks
import pytest


def test_a_notebook_becomes_a_page_with_its_output() -> None:
    printed = {"name": "stdout", "text": ["3\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": [printed, {"name": "stderr", "text": ["warned"]}]},
    ]
    page = docs_hooks.notebook_page(json.dumps({"cells": cells}))
    assert page == "# Title\ntext\n\n```python\nprint(3)\n```\n\n```text\n3\n```\n"


def test_pages_lose_sphinx_roles_and_links_to_themselves() -> None:
    own = "<p>Where next: <code>docs/packages/tp-styles.md</code>, all\nin the repository.</p>"
    page = f"<p>:meth:<code>validate</code> lists</p>{own}"
    assert docs_hooks.on_page_content(page) == "<p><code>validate</code> lists</p>"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="this machine has no Chromium")
@pytest.mark.parametrize("pixels", [380, 600])
def test_what_is_cut_on_a_phone_is_found(pixels: int, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<!doctype html><article><div style='width: {pixels}px'>.</div></article>")
    assert check_docs.widths(tmp_path) == (pixels > 390)
