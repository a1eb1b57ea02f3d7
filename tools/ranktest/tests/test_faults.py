"""One rank's exception, hang or death is reported, and the next test passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "samples" / "faults.py"
INI = "[pytest]\naddopts = --import-mode=importlib --strict-markers\nfilterwarnings = error\n"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable)


def run_sample(folder: Path, *options: str, launch: tuple[str, ...] = ()) -> tuple[str, int]:
    """Run the sample with pytest; returns the output and the exit code."""
    (folder / "test_faults.py").write_text(SAMPLE.read_text())
    (folder / "pytest.ini").write_text(INI)
    command = [sys.executable, *launch, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "ranktest.plugin"]
    completed = subprocess.run(
        [*command, "test_faults.py", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return completed.stdout, completed.returncode


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return run_sample(tmp_path_factory.mktemp("faults"))


def story(output: str, test: str) -> str:
    """Return the part of the report about one failure."""
    match = re.search(rf"^_+ {re.escape(test)} _+$(.*?)(?=^_{{5,}} |^=====)", output, re.DOTALL | re.MULTILINE)
    assert match, output
    return match[1]


def outcome(output: str, test: str) -> str:
    outcomes = re.findall(rf"::{re.escape(test)} (PASSED|FAILED|SKIPPED|ERROR)", output)
    assert len(outcomes) == 1, output
    return str(outcomes[0])


def test_exit_code_and_counts(run: tuple[str, int]) -> None:
    output, code = run
    assert code == 1
    assert "8 failed, 7 passed, 1 skipped" in output, output


def test_exception_on_one_rank(run: tuple[str, int]) -> None:
    output, _ = run
    text = story(output, "test_raises")
    assert "rank 0: silent: stack below, then killed" in text
    assert "rank 1: failed: AssertionError: assert {'" in text
    assert "{'other': 1} != {'other': 0}" in text, "asserts are rewritten"
    assert re.search(r"rank 0: stack -+\n(.*\n)*?  File .*test_faults.py\", line \d+ in test_raises", text)
    assert "printed by rank 0" in text
    assert "printed by rank 1" in text


def test_hang_on_one_rank(run: tuple[str, int]) -> None:
    output, _ = run
    text = story(output, "test_hangs")
    assert "ranks [1] of 2 did not finish in time" in text
    assert "rank 0: passed" in text
    assert re.search(r"rank 1: stack -+\n(.*\n)*?  File .*test_faults.py\", line \d+ in test_hangs", text)
    assert outcome(output, "test_after_hangs") == "PASSED"


def test_death_of_one_rank(run: tuple[str, int]) -> None:
    output, _ = run
    text = story(output, "test_dies")
    assert "rank 1 of 2 died: exit code 3" in text
    assert re.search(r"rank 0: stack -+\n(.*\n)*?  File .*test_faults.py\", line \d+ in test_dies", text)
    assert outcome(output, "test_after_dies") == "PASSED"


def test_skips_are_agreed_and_listed(run: tuple[str, int]) -> None:
    output, _ = run
    assert outcome(output, "test_all_skip") == "SKIPPED"
    assert "test_faults.py::test_all_skip: not today" in output
    assert "ranks disagree: ['skipped', 'passed']" in story(output, "test_one_skips")


def test_warnings_are_errors_in_ranks(run: tuple[str, int]) -> None:
    output, _ = run
    assert "UserWarning: careful" in story(output, "test_warns")
    assert outcome(output, "test_warns_allowed") == "PASSED"
    assert "ValueError: in del" in story(output, "test_unraisable")
    assert "ZeroDivisionError" in story(output, "test_thread")


def test_fixture_that_does_not_pickle(run: tuple[str, int]) -> None:
    output, _ = run
    assert "fixture 'unpicklable' cannot be sent to the ranks" in story(output, "test_unpicklable")


def test_torchrun_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    """Under two processes: three ranks are left out, one or two run, one process reports."""
    output, code = run_sample(tmp_path, "-k", "three or sizes or warns", launch=TORCHRUN)
    assert code == 1
    assert "test_faults.py::test_three: needs 3 ranks, there are 2" in output
    assert "test_faults.py::test_sizes[ranks1]: 1 of 2 ranks: runs on 2 of them" in output
    assert outcome(output, "test_sizes[ranks2]") == "PASSED"
    assert output.count("short test summary info") == 1, output


def test_methods_and_parameters(run: tuple[str, int]) -> None:
    for test in ("test_method[3]", "test_three", "test_sizes[ranks1]", "test_sizes[ranks2]"):
        assert outcome(run[0], test) == "PASSED"
