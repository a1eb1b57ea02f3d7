"""The command line: what it prints, its exit status, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from shard_reshard.cli import main


def test_help_and_explain_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom shard_reshard.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "main(['explain', '--shape', '8,8', '--src', '4: S(0)', '--dst', '2x2: S(1), R'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--shape", "8192,8192", "--src", "8: S(0)", "--dst", "2x4: S(1), R"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "reshard of 8192 x 8192 float32" in text
    assert "896 MiB as float32, 1.00 x the lower bound" in text


def test_problems_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", "8,8", "--src", "4: S(5)", "--dst", "4: S(7)"]) == 1
    message = capsys.readouterr().err
    assert "src" in message
    assert "dst" in message
    assert main(["explain", "--shape", "eight", "--src", "4: S(0)", "--dst", "4: R"]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["explain"])
    assert caught.value.code == 2
    layouts = ["--src", "4: S(0)", "--dst", "4: S(0) on ranks 0..99999999999"]
    assert main(["explain", "--shape", "8,8", *layouts]) == 1
    assert "more ranks than its mesh" in capsys.readouterr().err
    assert main(["explain", "--shape", "9", "--src", "4: P(avg)", "--dst", "4: R", "--dtype", "int32"]) == 1
    assert "unsupported-dtype" in capsys.readouterr().err


def test_large_worlds_print_their_busiest_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", "640,64", "--src", "64: S(0)", "--dst", "8x8: S(1), R"]) == 0
    assert "sends most: rank" in capsys.readouterr().out
