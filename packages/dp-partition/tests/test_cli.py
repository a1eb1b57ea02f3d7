"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dp_partition.cli import main

STEP = ["estimate", "dp_cli_steps:train_step", "--world", "8", "--style"]


def test_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "memory.svg"
    assert main([*STEP, "fully_shard", "--svg", str(page), "--name", "0.weight"]) == 0
    out, err = capsys.readouterr()
    assert "0.weight: [16, 8] torch.float32" in out
    assert "all_gather 0 of 3" in out
    assert err.splitlines() == [f"wrote {page}"]
    assert "train_step" in page.read_text() or "mean_step" in page.read_text()
    assert main([*STEP, "zero2", "--json", "--device", "cuda"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["num_messages"] == {"all_gather": 1, "reduce_scatter": 1}


def test_parameters_gathered_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "fully_shard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_messages"] == {"all_gather": 2, "reduce_scatter": 1}


def test_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*STEP, "zero9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "invalid-argument"
    assert main(["estimate", "dp_cli_steps:diverging_step", "--world", "2"]) == 1
    assert "not-traceable" in capsys.readouterr().err
    usage = [
        ["estimate", "dp_cli_steps", "--world", "2"],
        ["estimate", "no_such_module:x", "--world", "2"],
        ["estimate", "dp_cli_steps:nothing", "--world", "2"],
        ["estimate", "dp_cli_steps:train_step"],
        ["estimate", "dp_cli_steps:train_step", "--world", "2", "--args", "no_tuple"],
        ["estimate", "dp_cli_steps:train_step", "--world", "2", "--args", "json:__name__"],
        [*STEP, "zero1", "--name", "nothing"],
        [*STEP, "zero1", "--svg", str(tmp_path / "no" / "memory.svg")],
        [],
    ]
    for arguments in usage:
        assert main(arguments) == 2, arguments
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    capsys.readouterr()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from dp_partition.cli import main; main(['estimate', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_import_loads_no_compiler() -> None:
    """Making an optimizer does, which takes seconds: nothing here may make one while it is imported."""
    code = "import sys; import dp_partition.runner; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
