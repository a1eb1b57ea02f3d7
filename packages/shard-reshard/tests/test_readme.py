"""The README's examples run: plain ones here, those marked with ranks on that many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranktest import Ranks

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- run: torchrun (\d+) -->\n)?```python\n(.*?)```", re.DOTALL)


def _blocks(ranks: int) -> list[str]:
    return [code for _, count, code in _BLOCK.findall(README.read_text()) if int(count or 1) == ranks]


def test_examples_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = _blocks(1)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert "wq: reshard of 8 x 12 float32" in capsys.readouterr().out


@pytest.mark.ranks(4)
def test_examples_on_ranks(ranks: Ranks) -> None:
    blocks = _blocks(4)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
