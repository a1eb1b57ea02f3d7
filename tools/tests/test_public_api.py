"""The lists of public names, and what breaks callers since a release, tried in a scratch clone."""

from __future__ import annotations

import pytest
from scratch import Clone

TOOL = "tools/public_api.py"


@pytest.fixture
def released(clone: Clone) -> Clone:
    """A clone in which tp-ddp-bridge is released, with lists as the sources are."""
    clone.python(TOOL, "--write")
    clone.git("tag", "tp-ddp-bridge-v0.1.0")
    return clone


def test_what_breaks_callers_must_be_announced(released: Clone) -> None:
    released.python(TOOL)
    assert "since tp-ddp-bridge-v0.1.0: nothing unannounced" in released.python(TOOL, "--breaks")

    package = released.path / "packages" / "tp-ddp-bridge"
    (file,) = [f for f in (package / "src").rglob("*.py") if "def undo_dp_transform(" in f.read_text()]
    file.write_text(file.read_text().replace("def undo_dp_transform(", "def undo_dp_transform(certainly: bool, "))
    assert "+def undo_dp_transform(certainly: bool" in released.python(TOOL, status=1)
    assert "certainly" in released.python(TOOL, "--breaks", status=1)

    (package / "changes" / "+undo.changed.md").write_text("`undo_dp_transform` asks whether you are certain.\n")
    released.python(TOOL, "--breaks")


def test_a_name_that_is_no_longer_exported_is_found(released: Clone) -> None:
    init = released.path / "packages" / "tp-ddp-bridge" / "src" / "tp_ddp_bridge" / "__init__.py"
    init.write_text(init.read_text().replace('    "undo_dp_transform",\n', ""))
    assert "undo_dp_transform is no longer exported" in released.python(TOOL, "--breaks", status=1)
