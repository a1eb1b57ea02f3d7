"""A survey needs no process group."""

from __future__ import annotations

from torch import nn
from tp_ddp_bridge.module.survey import survey


def test_a_plain_module_and_one_that_cannot_be_bridged() -> None:
    surveyed = survey(nn.Linear(2, 2))
    assert (
        surveyed.bridgeable == surveyed.meshes == []
        and list(surveyed.plain) == ["weight", "bias"]
        and surveyed.problems == []
    )
    lazy = nn.LazyLinear(3)
    assert [problem.code for problem in survey(lazy).problems] == ["uninitialized-parameter"] * 2
