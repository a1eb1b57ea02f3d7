"""The README's examples run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_examples() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 1
    code = "\n".join(blocks)
    process = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:dp_partition", "-c", code], capture_output=True
    )
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    assert "0.weight: [32, 8]" in process.stdout.decode()
