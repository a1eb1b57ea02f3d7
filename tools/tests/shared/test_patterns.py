"""Patterns of names against a slower reading of the same rules."""

from __future__ import annotations

import fnmatch
import itertools

import pytest
from shared.patterns import Pattern, most_specific
from shared.problems import PlanError


def test_patterns_match_as_segments_do() -> None:
    names = [".".join(parts) for n in range(1, 5) for parts in itertools.product(("a", "b", "ab", "0"), repeat=n)]
    for glob in ("a", "*.b", "a.*", "?.ab", "{a,0}.b", "[ab].b", "[!a].b.*"):
        for name in names:
            by_segment = len(glob.split(".")) == name.count(".") + 1 and any(
                all(map(fnmatch.fnmatchcase, name.split("."), one.split("."))) for one in Pattern(glob).alternatives
            )
            assert Pattern(glob).matches(name) == by_segment, (glob, name)
    assert [n for n in ("", "a", "a.b", "b", "b.a") if Pattern("a.**").matches(n)] == ["a", "a.b"]
    assert [n for n in ("", "a", "a.b") if Pattern("**").matches(n)] == ["a", "a.b"]
    assert [n for n in ("a", "b.a", "a.b") if Pattern("**.a").matches(n)] == ["a", "b.a"]


@pytest.mark.parametrize("text", ["a..b", "a**", "{a", "[a", "[]", "re:(", r"re:l\.\d+", "a*" * 5, "x" * 1001])
def test_bad_patterns_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="invalid-argument"):
        Pattern(text)


def test_an_exact_name_beats_all_globs_and_no_glob_another() -> None:
    def decided(*texts: str) -> list[str]:
        return [pattern.text for pattern in most_specific(map(Pattern, texts))]

    assert decided("**.weight", "fc.weight", "fc.*") == ["fc.weight"]
    assert decided("**", "layers.**", "layers.0.*") == ["**", "layers.**", "layers.0.*"]
    assert decided("**", "**") == ["**"]
    assert decided() == []
