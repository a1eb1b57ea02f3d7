"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranktest import Ranks


@pytest.mark.ranks(2)
def test_readme(ranks: Ranks) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
