"""Values and planning: no process group."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from tp_ddp_bridge import BridgePlan, PlanError, Problem, ViewEntry, bridge_plan
from tp_ddp_bridge.axes import AxisRanks, data_axes, mixing_problems

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
    assert [problem.code for problem in bridge_plan(lazy).problems] == ["lazy", "lazy"]
    assert "lazy" in bridge_plan(lazy).explain()


def test_problems_read_as_lines_and_pickle() -> None:
    problem = Problem("partial", "w", dim=1, axis="tp", found="a partial sum", hint="reduce it")
    error = PlanError([problem, Problem("lazy", "v")], "cannot")
    assert isinstance(error, ValueError)
    assert str(error).splitlines() == [
        "cannot",
        "- [partial] w, dim 1, axis 'tp': a partial sum; reduce it",
        "- [lazy] v",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
    assert PlanError(problem).problems == (problem,)


def mesh_axes(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> list[AxisRanks]:
    """The axes of a mesh over consecutive ranks, as ``rank`` sees them."""
    table = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    place = (table == rank).nonzero()[0].tolist()
    axes = []
    for index, name in enumerate(names):
        line = table[tuple(slice(None) if axis == index else at for axis, at in enumerate(place))]
        axes.append(AxisRanks(name, frozenset(line.tolist())))
    return axes


def test_data_axes_of_every_rank_of_every_mesh() -> None:
    checked = 0
    for shape, names, tensor, wanted in (
        ((2, 2), ("dp", "tp"), {"tp"}, ("dp",)),
        ((4, 1), ("dp", "tp"), {"tp"}, ("dp",)),
        ((1, 4), ("dp", "tp"), {"tp"}, ("dp",)),
        ((1, 1), ("dp", "tp"), {"tp"}, ("dp",)),
        ((2, 2, 2), ("dp", "cp", "tp"), {"tp"}, ("dp", "cp")),
        ((2, 2, 2), ("dp", "a", "b"), {"a", "b"}, ("dp",)),
        ((8, 125), ("dp", "tp"), {"tp"}, ("dp",)),
        ((4,), ("dp",), set(), ("dp",)),
    ):
        for rank in range(int(torch.tensor(shape).prod())):
            axes = mesh_axes(shape, names, rank)
            held = {f"w_{axis.name}": axis.ranks for axis in axes if axis.name in tensor}
            if len(tensor) == 2:
                held = {"w": frozenset(r for r in range(8) if r // 4 == rank // 4)}
            found, problems = data_axes(rank, axes, held)
            assert found == wanted and problems == (), (shape, rank, found)
            checked += 1
    assert checked == 4 + 4 + 4 + 1 + 8 + 8 + 1000 + 4


def test_axes_that_mix() -> None:
    axes = mesh_axes((2, 2), ("dp", "tp"), 1)
    everything = frozenset(range(4))
    found, problems = data_axes(1, axes, {"w": everything})
    assert found == () and problems[0].code == "no-data-axis"
    only = mixing_problems(1, frozenset({1, 3}), {"w": frozenset({0, 1}), "v": frozenset({1, 2, 3})})
    assert [problem.name for problem in only] == ["v"] and only[0].code == "groups-mix" and "[1, 3]" in only[0].found
    wide = [AxisRanks("odd", frozenset({0, 1, 2}))]
    found, problems = data_axes(1, wide, {"w": frozenset({0, 1})})
    assert found == () and problems[0].code == "groups-mix" and problems[0].axis == "odd"
