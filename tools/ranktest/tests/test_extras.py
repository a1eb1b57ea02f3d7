"""Tests of extras are left out only with `--without-extras`, and then listed."""

from __future__ import annotations

import pytest

TESTS = """
    import pytest

    @pytest.mark.extra("pluggy")
    def test_present():
        pass

    @pytest.mark.extra("pluggy", "no-such-distribution")
    def test_missing():
        pass

    def test_plain():
        pass

    @pytest.mark.ranks("2")
    def test_bad_size():
        pass
"""


def test_missing_distribution_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-k", "not bad_size", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.assert_outcomes(passed=2, errors=1, deselected=1)
    result.stdout.fnmatch_lines(["*'no-such-distribution' is not installed*--without-extras*"])


@pytest.mark.extra("pytest-xdist")
@pytest.mark.parametrize("workers", [(), ("-n2", "-p", "xdist")], ids=["alone", "xdist"])
def test_without_extras_lists_what_it_left_out(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        TESTS.replace('"2"', "2").replace("def test_bad_size", "@pytest.mark.extra('x')\n    def test_x")
    )
    result = pytester.runpytest_subprocess(*workers, "--without-extras", "-p", "no:cacheprovider")
    assert result.ret == 0
    result.assert_outcomes(passed=1, deselected=0 if workers else 3)
    result.stdout.fnmatch_lines(
        ["*not run: 3*", "*::test_present: needs pluggy (--without-extras)", "*::test_missing: needs pluggy, no-such*"]
    )


def test_wrong_world_size_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_bad_size: @pytest.mark.ranks takes positive whole numbers, not ('2',)*"])
