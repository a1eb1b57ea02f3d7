"""The lists of public names differ from sources whose names or signatures changed."""

from __future__ import annotations

from scratch import Clone

TOOL = "tools/public_api.py"


def test_a_changed_signature_and_a_name_that_is_gone_are_found(clone: Clone) -> None:
    clone.python(TOOL, "--write")
    clone.python(TOOL)
    source = clone.path / "packages" / "tp-ddp-bridge" / "src"
    (file,) = [f for f in source.rglob("*.py") if "def undo_dp_transform(" in f.read_text()]
    file.write_text(file.read_text().replace("def undo_dp_transform(", "def undo_dp_transform(certainly: bool, "))
    assert "+def undo_dp_transform(certainly: bool" in clone.python(TOOL, status=1)
    init = source / "tp_ddp_bridge" / "__init__.py"
    init.write_text(init.read_text().replace('    "undo_dp_transform",\n', ""))
    assert "-def undo_dp_transform(" in clone.python(TOOL, status=1)
