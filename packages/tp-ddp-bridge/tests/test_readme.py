"""The README's examples run, the support table is the one that the tests give."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import support
import torch.distributed as dist
import tp_ddp_bridge
from ranktest import Ranks

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


@pytest.mark.ranks(4)
def test_examples(ranks: Ranks) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    scope: dict[str, object] = {"__name__": "readme"}
    for name in ("init_process_group", "destroy_process_group"):  # the ranks have a group, and need it afterwards
        setattr(dist, name, lambda *args: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")  # what checkpointing says about its own future
        for block in blocks:
            exec(compile(block, str(README), "exec"), scope)
    assert ranks.world_size == 4


def test_support_table() -> None:
    tests = {test for _, _, test in support.ROWS}
    assert tests <= support.tests_of(HERE), tests - support.tests_of(HERE)
    assert support.PAGE.read_text() == support.table(), "run: python tests/support.py"
    refused = [row for row in support.ROWS if row[1] != support.RIGHT]
    assert all("refused: `" in outcome for _, outcome, _ in refused)


def test_importing_the_package_does_not_import_torch() -> None:
    names = "', '".join(tp_ddp_bridge.__all__)
    code = f"""
import sys, tp_ddp_bridge
assert 'torch' not in sys.modules
assert [hasattr(tp_ddp_bridge, name) for name in ('{names}',)] == [True] * {len(tp_ddp_bridge.__all__)}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
