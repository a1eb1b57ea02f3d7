"""The README's examples run: the planted mistake is reported as shown there, and passes when it is corrected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
RUN = ("-p", "no:cacheprovider", "-W", "error")


def test_the_first_example_fails_as_shown_and_passes_when_corrected(pytester: pytest.Pytester) -> None:
    (_, example), (_, report) = BLOCKS[:2]
    body = example[example.index("@pytest") :].splitlines()
    assert len(body) <= 10
    pytester.makepyfile(test_mistake=example)
    result = pytester.runpytest_subprocess(*RUN)
    result.assert_outcomes(failed=1)
    assert report.strip() in result.stdout.str()
    failed = re.findall(r"rank (\d): failed: assert \[nan, nan, nan\] == \[1.0, 1.0, 1.0\]", result.stdout.str())
    assert set(failed) == {"0", "1"}  # where CI is set pytest prints the summary in full, so each stands there twice

    early, late = [line for line in body if "mean = " in line or "work.wait" in line]
    corrected = example.replace(f"{early}\n{late}\n", f"{late}\n{early}\n")
    assert corrected != example
    pytester.path.joinpath("test_mistake.py").write_text(corrected)
    pytester.runpytest_subprocess(*RUN).assert_outcomes(passed=1)


def test_the_other_examples_pass(pytester: pytest.Pytester) -> None:
    others = [code for language, code in BLOCKS[2:] if language == "python"]
    assert others
    pytester.makepyfile(**{f"test_{number}": code for number, code in enumerate(others)})
    pytester.runpytest_subprocess(*RUN).assert_outcomes(passed=len(others))
