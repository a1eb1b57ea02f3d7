"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tp_styles.cli import main


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tp_models:GPT", "tp_models:gpt_plan", "--num-tokens", "10"]) == 0
    out = capsys.readouterr().out
    assert "tensor parallel over 2 ranks" in out
    assert "640 bytes" in out
    assert main(["explain", "tp_models:GPT", "tp_models:gpt_plan", "--json", "--world-size", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["tp_size"] == 4


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tp_models:MLP", "tp_models:gpt_plan"]) == 1  # patterns that mean nothing
    assert main(["explain", "tp_models"]) == 2
    assert main(["explain", "no_such_module:x"]) == 2
    assert main(["explain", "tp_models:Nothing"]) == 2
    assert main([]) == 2
    assert main(["--help"]) == 0
    capsys.readouterr()


def test_help_needs_no_torch() -> None:
    code = "import sys; from tp_styles.cli import main; main(['explain', '--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
