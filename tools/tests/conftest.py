"""The tools on the import path, and clones of the repository in which releases are tried."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS))

import repo  # noqa: E402
from scratch import Clone  # noqa: E402


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone of what is committed, with the tools and sessions of the working tree."""
    clone = Clone(tmp_path_factory.mktemp("committed"))
    shutil.rmtree(clone.path / "tools")
    shutil.copytree(TOOLS, clone.path / "tools", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("noxfile.py", "pyproject.toml"):
        shutil.copy(repo.ROOT / name, clone.path / name)
    clone.git("add", "--all")
    clone.git("commit", "--quiet", "--allow-empty", "--message", "tools")
    return clone


@pytest.fixture
def clone(committed: Clone, tmp_path: Path) -> Clone:
    """A clone for one test."""
    return Clone(tmp_path, of=committed.path)
