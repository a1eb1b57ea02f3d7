"""A survey needs no process group."""

from __future__ import annotations

from torch import nn
from tp_ddp_bridge.module.transform import survey


def test_a_plain_module_has_nothing_to_bridge() -> None:
    surveyed = survey(nn.Linear(2, 2))
    assert list(surveyed.plain) == ["weight", "bias"]
    assert surveyed.bridgeable == []
    assert surveyed.meshes == []
    assert surveyed.problems == []


def test_each_parameter_without_a_shape_is_a_problem() -> None:
    problems = survey(nn.LazyLinear(3)).problems
    assert [(problem.name, problem.code) for problem in problems] == [
        ("weight", "uninitialized-parameter"),
        ("bias", "uninitialized-parameter"),
    ]
