"""Patterns: what they match, which is more specific, and what they refuse."""

from typing import Any

import pytest
from shard_spec import Pattern, PlanError


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("fc1.weight", ["fc1.weight"], ["fc1.weights", "a.fc1.weight", "fc1xweight"]),
        ("layers.*.wq.weight", ["layers.0.wq.weight"], ["layers.0.1.wq.weight", "layers.wq.weight"]),
        ("**.norm.*", ["norm.weight", "a.norm.bias", "a.b.norm.weight"], ["a.norm", "a.norm.x.weight", "xnorm.weight"]),
        ("layers.**", ["layers", "layers.0", "layers.0.a.b"], ["layer", "layersx", "x.layers.0"]),
        ("a.**.z", ["a.z", "a.b.z", "a.b.c.z"], ["a.bz", "az"]),
        ("**", ["a", "a.b.c"], [""]),
        ("w?", ["w1", "wq"], ["w", "w.1", "wqq"]),
        ("attn.{wq,wk}.weight", ["attn.wq.weight", "attn.wk.weight"], ["attn.wv.weight"]),
        ("{a,b}.{x,y}", ["a.x", "b.y"], ["a.b"]),
        ("w[qk]", ["wq", "wk"], ["wv", "wqk"]),
        ("w[!qk]", ["wv"], ["wq", "w."]),
        ("w*t", ["wt", "weight"], ["w.t"]),
        (r"re:layers\.\d+\.w[qk]\.weight", ["layers.12.wq.weight"], ["layers.x.wq.weight", "xlayers.1.wq.weight"]),
        ("re:a|bc", ["a", "bc"], ["ac", "abc"]),
    ],
)
def test_matching(pattern: Any, yes: Any, no: Any) -> None:
    read = Pattern(pattern)
    assert [name for name in yes if not read.matches(name)] == []
    assert [name for name in no if read.matches(name)] == []


@pytest.mark.parametrize(
    ("specific", "general"),
    [
        ("layers.0.wq.weight", "layers.*.wq.weight"),
        ("layers.0.*", "layers.**"),
        ("layers.*.wq.weight", "**.wq.weight"),
        ("layers.*.{wq,wk}.weight", "layers.*.*.weight"),
        ("layers.*.attn.w*.weight", "layers.*.attn.*.weight"),
        ("**.wq.weight", "**.weight"),
        ("layers.*.w1.weight", "**"),
        (r"re:layers\.\d+", "**"),
        ("a.wq*.z", "a.w*.z"),
    ],
)
def test_specific_is_within_general_and_not_the_other_way(specific: Any, general: Any) -> None:
    assert Pattern(specific).within(Pattern(general))
    assert not Pattern(general).within(Pattern(specific))


def test_incomparable_patterns_are_within_neither_way() -> None:
    for one, other in [("layers.0.**", "**.bias"), ("w?", "w*x"), ("re:a.*", "a*"), ("*.a", "b.*")]:
        assert not Pattern(one).within(Pattern(other))
        assert not Pattern(other).within(Pattern(one))


def test_within_is_true_only_if_every_matching_name_matches_the_other() -> None:
    import itertools

    segments = ["a", "b", "ab"]
    names = [".".join(p) for n in (1, 2, 3) for p in itertools.product(segments, repeat=n)]
    patterns = [
        "**",
        "*",
        "a.**",
        "**.a",
        "a.*",
        "*.a",
        "a.**.b",
        "a*",
        "*b",
        "{a,b}.*",
        "**.*",
        "*.**",
        "[ab].a",
        "a?",
    ]
    compared = 0
    for one, other in itertools.product(map(Pattern, patterns), repeat=2):
        if one.within(other):
            assert all(other.matches(name) for name in names if one.matches(name)), (one, other)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    "text",
    [
        "re:(",
        "a..b",
        ".a",
        "a.",
        "a.b**.c",
        "{a,b",
        "{a,{b,c}}",
        "a[b",
        "x" * 1001,
        "{" + ",".join("abcdefghij") + "}" + "{" + ",".join("abcdefghij") + "}" + "{a,b,c,d}",
        "re:(a+)+$",
        "re:(a|aa)*b",
        "re:((ab)*)*",
        "re:" + ".*" * 5,
        "*a*a*a*a*",
        "**.**.**.**.**.a",
    ],
)
def test_unreadable_and_slow_patterns_are_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="invalid-argument"):
        Pattern(text)
