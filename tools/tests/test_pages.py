"""What pages say is tested: the tests that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "folder", "least"), [("design/dp-partition-tests", "packages/dp-partition/tests", 31), ("refused", "", 18)]
)
def test_the_tests_that_a_page_names_are_there(name: str, folder: str, least: int) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)*test_\w+)(?:\.py)?::(test_\w+)`", page)
    assert len(named) >= least
    places = [ROOT / folder, ROOT / "packages"]
    for file, test in named:
        text = "".join(path.read_text() for place in places if (path := place / f"{file}.py").exists())
        assert f"def {test}(" in text, f"{file}::{test}"


def test_the_files_that_the_recipes_name_are_there() -> None:
    named = re.findall(r"`([\w./-]+(?:/|\.(?:py|md|toml)))`", (ROOT / ".github" / "CONTRIBUTING.md").read_text())
    packages = ROOT / "packages"
    places = [ROOT, *packages.iterdir(), *packages.glob("*/src/*")]
    assert len(named) > 20
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
