"""The tools on the import path, and a clone to try releases in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS))

from scratch import Clone  # noqa: E402


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone of the repository as it is committed, with today's tools, committed there."""
    clone = Clone(tmp_path_factory.mktemp("committed"))
    for file in (TOOLS.parent / "noxfile.py", *TOOLS.glob("*.py"), *TOOLS.glob("*.toml")):
        shutil.copy(file, clone.path / file.relative_to(TOOLS.parent))
    clone.git("add", "--all")
    clone.git("commit", "--quiet", "--allow-empty", "--message", "tools")
    return clone


@pytest.fixture
def clone(committed: Clone, tmp_path: Path) -> Clone:
    """A copy of it for one test."""
    return Clone(tmp_path, of=committed.path)
