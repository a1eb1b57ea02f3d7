"""Patterns: what they match, which one decides, and what they refuse."""

from typing import Any

import pytest
from shard_spec import PlanError, ShardingPlan
from shard_spec._shared.patterns import Pattern
from torch import nn


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
    ],
)
def test_matching(pattern: Any, yes: Any, no: Any) -> None:
    parsed = Pattern(pattern)
    assert [name for name in yes if not parsed.matches(name)] == []
    assert [name for name in no if parsed.matches(name)] == []


def test_an_exact_name_decides_and_globs_have_to_agree() -> None:
    weights = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("a", "b")})
    for globs in (("**", "*.weight"), ("{a,b}.weight", "?.w*")):
        agreeing = ShardingPlan(dict.fromkeys(globs, "S(0)"), mesh={"tp": 2})
        assert [str(layout) for layout in agreeing.resolve(weights).values()] == ["tp:S(0)"] * 2
        rules = {**dict.fromkeys(globs, "S(0)"), globs[1]: "S(1)"}
        problems = ShardingPlan(rules, mesh={"tp": 2}).validate(weights)
        assert [(p.code, p.name) for p in problems] == [("ambiguous-pattern", f"{name}.weight") for name in "ab"]
        for order in (1, -1):  # wherever they stand, the exact names decide
            listed = list({**rules, "a.weight": "R", "b.weight": "S(1)"}.items())[::order]
            exact = ShardingPlan(dict(listed), mesh={"tp": 2}).resolve(weights)
            assert {name: str(layout) for name, layout in exact.items()} == {"a.weight": "tp:R", "b.weight": "tp:S(1)"}


@pytest.mark.parametrize(
    "text",
    [
        "re:a",
        "a..b",
        ".a",
        "a.",
        "a.b**.c",
        "{a,b",
        "{a,{b,c}}",
        "a[b",
        "x" * 1001,
        "{" + ",".join("abcdefghij") + "}" + "{" + ",".join("abcdefghij") + "}" + "{a,b,c,d}",
        "*a*a*a*a*",
        "**.**.**.**.**.a",
    ],
)
def test_unreadable_and_slow_patterns_are_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="invalid-argument"):
        Pattern(text)
