"""The lists of public names, and what breaks callers since a release, tried in a scratch clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = "tools/public_api.py"


def call(clone: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, TOOL, *options], cwd=clone, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone as committed, with today's tool and lists, in which tp-ddp-bridge is released."""
    target = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target)], check=True)
    (target / TOOL).write_text((ROOT / TOOL).read_text())
    assert call(target, "--write")[0] == 0
    subprocess.run(["git", "tag", "tp-ddp-bridge-v0.1.0"], cwd=target, check=True)
    return target


def test_what_breaks_callers_must_be_announced(clone: Path) -> None:
    assert call(clone)[0] == 0
    status, said = call(clone, "--breaks")
    assert status == 0, said
    assert "since tp-ddp-bridge-v0.1.0: nothing unannounced" in said

    sources = clone / "packages" / "tp-ddp-bridge" / "src" / "tp_ddp_bridge"
    (file,) = [f for f in sources.rglob("*.py") if "def undo_dp_transform(" in f.read_text()]
    file.write_text(file.read_text().replace("def undo_dp_transform(", "def undo_dp_transform(certainly: bool, "))
    status, said = call(clone)
    assert status == 1
    assert "+def undo_dp_transform(certainly: bool" in said
    status, said = call(clone, "--breaks")
    assert status == 1
    assert "certainly" in said

    changelog = clone / "packages" / "tp-ddp-bridge" / "CHANGELOG.md"
    announced = "## [Unreleased]\n\n### Changed\n\n- `undo_dp_transform` asks whether you are certain.\n"
    changelog.write_text(changelog.read_text().replace("## [Unreleased]\n", announced, 1))
    assert call(clone, "--breaks")[0] == 0


def test_a_name_that_is_no_longer_exported_is_found(clone: Path) -> None:
    init = clone / "packages" / "tp-ddp-bridge" / "src" / "tp_ddp_bridge" / "__init__.py"
    init.write_text(init.read_text().replace('    "undo_dp_transform",\n', ""))
    status, said = call(clone, "--breaks")
    assert status == 1
    assert "undo_dp_transform is no longer exported" in said
