"""FullyShardPlanner and composition."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from shard_spec import Layout, MeshSpec, PlanError, ShardingPlan
from shard_spec.plan.content import glob_rules
from shard_spec.planners import (
    Decisions,
    FullyShardPlanner,
    LayoutPlanner,
    MegatronPlanner,
    PlannedSharding,
    ShardingPlanner,
    compose,
)
from torch import nn

MESH = MeshSpec({"dp": 2, "tp": 2})


def rules(plan: ShardingPlan) -> dict[str, str]:
    """Rules as text, without axes that replicate."""
    texts = {pattern: str(value).split(", ") for pattern, value in plan.plan.items()}
    return {pattern: ", ".join(item for item in items if not item.endswith(":R")) for pattern, items in texts.items()}


class Net(nn.Module):
    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, rows), nn.GELU(), nn.Linear(rows, 4)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))


# ---- fully shard ----------------------------------------------------------------------------------------------------


def test_every_parameter_is_cut_by_rows() -> None:
    plan = FullyShardPlanner(MESH).build_plan(Net())
    assert rules(plan) == {"layers.*.*.weight": "dp:S(0)", "layers.*.*.bias": "dp:S(0)"}
    layouts = plan.resolve(Net())
    assert len(layouts.parameters) == 13
    assert layouts["scale"].is_replicated
    assert all(layout.sharded_axes == {"dp": 0} for name, layout in layouts.parameters.items() if name != "scale")


def test_uneven_rows_leave_the_last_ranks_fewer() -> None:
    odd = Net(rows=7)
    plan = FullyShardPlanner(MESH).build_plan(odd)
    assert plan.resolve(odd)["layers.1.0.weight"].local_shape(3, (7, 4)) == (3, 4)


def test_an_exact_rule_keeps_a_parameter_whole() -> None:
    net = Net()
    plan = FullyShardPlanner(MESH).build_plan(net) | ShardingPlan({"layers.1.0.weight": "dp:R"}, mesh=MESH)
    assert plan.validate(net) == ()
    assert plan.resolve(net)["layers.1.0.weight"].is_replicated
    assert not plan.resolve(net)["layers.2.0.weight"].is_replicated


def test_two_axes_in_their_order() -> None:
    plan = FullyShardPlanner(MESH, ("tp", "dp")).build_plan(nn.Linear(4, 8))
    layout = plan.resolve(nn.Linear(4, 8))["weight"]
    assert [layout.offsets(rank, (8, 4))[0] for rank in range(4)] == [0, 4, 2, 6]
    with pytest.raises(PlanError, match="unknown-axis"):
        FullyShardPlanner(MESH, "fsdp")


# ---- composition ----------------------------------------------------------------------------------------------------


def test_tensor_parallel_slices_are_sharded_over_data_parallel_ranks() -> None:
    net = Net()
    plan = compose(MegatronPlanner(MESH), FullyShardPlanner(MESH)).build_plan(net)
    assert isinstance(plan, PlannedSharding)
    assert plan.validate(net) == ()
    resolved = plan.resolve(net)
    column = resolved["layers.0.0.weight"]
    # Rank 1 is (dp 0, tp 1): the second tensor-parallel slice (rows 4-7), its first half.
    assert [column.offsets(rank, (8, 4)) for rank in range(4)] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    assert resolved["layers.0.2.weight"].sharded_axes == {"dp": 0, "tp": 1}
    for name, parameter in net.named_parameters():
        covered = torch.zeros(parameter.shape)
        for rank in range(4):
            if resolved[name].is_primary(rank):
                for box in resolved[name].boxes(rank, tuple(parameter.shape)):
                    covered[box.slices()] += 1
        assert bool((covered == 1).all()), name


def test_composition_refuses_what_contradicts() -> None:
    with pytest.raises(PlanError, match="duplicate-name"):
        compose(FullyShardPlanner(MESH), FullyShardPlanner(MESH)).build_plan(Net())
    with pytest.raises(PlanError, match="mesh-mismatch"):
        compose(FullyShardPlanner(MESH), FullyShardPlanner({"dp": 2}))
    with pytest.raises(ValueError, match="at least one"):
        compose()


def test_a_users_own_planner_is_a_planner() -> None:
    class Everything(ShardingPlanner):
        def build_plan(self, module: nn.Module) -> ShardingPlan:
            return ShardingPlan({"**": "dp:R"}, mesh=MESH)

    assert Everything().build_plan(Net()).validate(Net()) == ()
    with pytest.raises(TypeError):
        ShardingPlanner()  # type: ignore[abstract]  # on purpose
    assert issubclass(LayoutPlanner, ShardingPlanner)


def test_rules_name_each_layout_and_nothing_else() -> None:
    rng = random.Random(0)
    names = [f"layers.{i}.{part}.{kind}" for i in range(5) for part in "ab" for kind in ("weight", "bias")] + [
        "head.weight"
    ]
    texts = ["dp:S(0)", "tp:S(1)", "dp:S(0), tp:S(0); order=tp>dp", "tp:I(0,[4,4])", "R, R"]
    for _ in range(60):
        layouts = {
            name: Layout(MESH, rng.choice(texts[: rng.randint(1, 5)]))
            for name in names
            if rng.random() < rng.random() + 0.5
        }
        globs = glob_rules({name: layouts.get(name) for name in names}, (), ())
        module = nn.Module()
        for name in names:
            at = module
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.register_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(torch.zeros(8, 8)))
        resolved = ShardingPlan(globs, mesh=MESH).resolve(module)
        for name in names:
            assert resolved[name] == layouts.get(name, Layout.replicated(MESH)), name


class AllBut(FullyShardPlanner):
    def __init__(self, names: set[str]) -> None:
        super().__init__({"dp": 2})
        self.names = names

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        layouts = super().decide(module, given).layouts
        return Decisions({name: layout for name, layout in layouts.items() if name not in self.names})


def test_a_name_beside_numbers_is_not_taken_by_their_pattern() -> None:
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("0", "1", "last")})
    plan = AllBut({"last.weight", "last.bias"}).build_plan(layers)
    assert [name for name, layout in plan.resolve(layers).items() if layout.is_replicated] == [
        "last.weight",
        "last.bias",
    ]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 4))
    model[0].weight = model.get_parameter("head.weight")  # `*.weight` would match its other name
    resolved = AllBut({"0.weight"}).build_plan(model).resolve(model)
    assert [name for name, layout in resolved.items() if layout.is_replicated] == ["0.weight"]
