"""What the design pages say is tested: the tests that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_defect_of_the_original_data_parallel_graph_has_a_test() -> None:
    page = (ROOT / "docs" / "design" / "dp-partition-tests.md").read_text()
    tests = ROOT / "packages" / "dp-partition" / "tests"
    named = re.findall(r"`((?:\w+/)?test_\w+)::(test_\w+)`", page)
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (tests / f"{file}.py").read_text()]
    assert not missing
