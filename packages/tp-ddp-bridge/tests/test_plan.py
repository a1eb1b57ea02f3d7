"""Values and planning: no process group."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from torch import nn
from tp_ddp_bridge import BridgePlan, PlanError, Problem, ViewEntry, bridge_plan

ENTRY = ViewEntry(
    names=("emb.weight", "head.weight"), kind="parameter", shape=(32, 16), local_shape=(16, 16), placements=("S(0)",),
    axes=("tp",), mesh_shape=(2,), dtype="torch.float32", requires_grad=True,
)  # fmt: skip


def test_plan_is_a_value() -> None:
    plan = BridgePlan((ENTRY,), ("norm.weight",))
    assert pickle.loads(pickle.dumps(plan)) == plan and hash(plan) == hash(BridgePlan((ENTRY,), ("norm.weight",)))
    assert eval(repr(plan)) == plan
    assert plan.names == ("emb.weight", "head.weight")
    other_rank = BridgePlan((replace(ENTRY, local_shape=(15, 16)),), ("norm.weight",))
    assert other_rank.digest == plan.digest and other_rank != plan
    assert BridgePlan((replace(ENTRY, shape=(33, 16)),), ("norm.weight",)).digest != plan.digest
    assert json.loads(plan.to_json())["format"] == 1
    text = plan.explain()
    assert "tied: head.weight" in text and "tp[2]=S(0)" in text and "norm.weight" in text
    assert plan.explain("head.*").count("\n") == 0 and "plain" in plan.explain("norm.weight")
    with pytest.raises(KeyError, match="nothing"):
        plan.explain("nothing")
    with pytest.raises(ValueError, match="name"):
        replace(ENTRY, names=())
    with pytest.raises(ValueError, match="placement"):
        replace(ENTRY, placements=())


def test_plan_of_a_plain_module_and_of_what_cannot_be_bridged() -> None:
    plan = bridge_plan(nn.Linear(2, 2))
    assert plan.entries == () and plan.plain == ("weight", "bias") and plan.problems == ()
    lazy = nn.LazyLinear(3)
    assert [problem.code for problem in bridge_plan(lazy).problems] == [
        "uninitialized-parameter",
        "uninitialized-parameter",
    ]
    assert "uninitialized-parameter" in bridge_plan(lazy).explain()


def test_problems_read_as_lines_and_pickle() -> None:
    problem = Problem("partial-value", "w", dim=1, axis="tp", found="a partial sum", hint="reduce it")
    error = PlanError([problem, Problem("uninitialized-parameter", "v")], "cannot")
    assert isinstance(error, ValueError)
    assert str(error).splitlines() == [
        "cannot",
        "[partial-value] w, dim 1, axis 'tp': a partial sum -> reduce it",
        "[uninitialized-parameter] v:",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
    assert PlanError(problem).problems == (problem,)
