"""FullyShardPlanner, BalancedPlanner and composition."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from shard_spec import MeshSpec, PlanError, ShardingPlan
from shard_spec.planners import (
    BalancedPlanner,
    FullyShardPlanner,
    LayoutPlanner,
    MegatronPlanner,
    PlannedSharding,
    ShardingPlanner,
    compose,
)
from shard_spec.planners.balanced import Group, deal, rows_by_share
from shard_spec.planners.rules import rules_of, short_text
from torch import nn

MESH = MeshSpec({"dp": 2, "tp": 2})


def rules(plan: ShardingPlan) -> dict[str, str]:
    return {pattern: str(value) for pattern, value in plan.plan.items()}


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


def test_uneven_rows_by_policy() -> None:
    odd = Net(rows=7)
    assert FullyShardPlanner(MESH).build_plan(odd).resolve(odd)["layers.1.0.weight"].local_shape(3, (7, 4)) == (3, 4)
    kept = FullyShardPlanner(MESH, uneven="replicate").build_plan(odd)
    assert kept.resolve(odd)["layers.1.0.weight"].is_replicated
    assert not kept.resolve(odd)["layers.1.2.bias"].is_replicated
    assert {note.code for note in kept.notes} == {"uneven-shards"}
    assert len(kept.notes) == 2  # one for all weights, one for all biases
    with pytest.raises(PlanError, match="6 parameters do not divide") as error:
        FullyShardPlanner(MESH, uneven="refuse").build_plan(odd)
    assert len(error.value.problems) == 6
    with pytest.raises(ValueError, match="choose 'shard'"):
        FullyShardPlanner(MESH, uneven="pad")  # type: ignore[arg-type]  # on purpose


def test_small_and_named_parameters_stay_whole() -> None:
    net = Net()
    large = FullyShardPlanner(MESH, min_bytes=100).build_plan(net).resolve(net)
    assert large["layers.0.0.bias"].is_replicated
    assert not large["layers.0.0.weight"].is_replicated
    kept = FullyShardPlanner(MESH, keep=["layers.1.**"]).build_plan(net)
    assert kept.validate(net) == ()
    assert kept.resolve(net)["layers.1.0.weight"].is_replicated
    assert not kept.resolve(net)["layers.2.0.weight"].is_replicated
    with pytest.raises(PlanError, match="unmatched-pattern"):
        FullyShardPlanner(MESH, keep=["nothing"]).build_plan(net)


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
    found = plan.resolve(net)
    column = found["layers.0.0.weight"]
    # Rank 1 is (dp 0, tp 1): the second tensor-parallel slice (rows 4-7), its first half.
    assert [column.offsets(rank, (8, 4)) for rank in range(4)] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    assert found["layers.0.2.weight"].sharded_axes == {"dp": 0, "tp": 1}
    for name, parameter in net.named_parameters():
        covered = torch.zeros(parameter.shape)
        for rank in range(4):
            if found[name].is_primary(rank):
                for box in found[name].boxes(rank, tuple(parameter.shape)):
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
    from shard_spec import Layout

    for _ in range(60):
        layouts = {
            name: Layout(MESH, rng.choice(texts[: rng.randint(1, 5)]))
            for name in names
            if rng.random() < rng.random() + 0.5
        }
        found = rules_of(layouts, names)
        module = nn.Module()
        for name in names:
            at = module
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.register_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(torch.zeros(8, 8)))
        resolved = ShardingPlan(found, mesh=MESH).resolve(module)
        for name in names:
            assert resolved[name] == layouts.get(name, Layout.replicated(MESH)), name
    assert short_text(Layout(MESH, "dp:R, tp:I(0,[4,4])")) == "tp:I(0,[4,4])"


# ---- balanced -------------------------------------------------------------------------------------------------------


def tables(*rows: int, width: int = 2) -> nn.Module:
    return nn.ModuleDict({f"t{at}": nn.Embedding(count, width) for at, count in enumerate(rows)})


def test_whole_tables_are_dealt_evenly() -> None:
    module = tables(70, 50, 40, 30, 10)
    plan = BalancedPlanner({"dp": 2}).build_plan(module)
    assert plan.validate(module) == ()
    assert plan.certificate is not None
    assert plan.certificate.objective == 100 * 8
    assert plan.certificate.gap == 0
    found = plan.resolve(module)
    rows = [
        sum(found[f"t{at}.weight"].local_shape(rank, (n, 2))[0] for at, n in enumerate((70, 50, 40, 30, 10)))
        for rank in (0, 1)
    ]
    assert rows == [100, 100]
    assert all(
        0 in {found[f"t{at}.weight"].local_shape(rank, (n, 2))[0] for rank in (0, 1)} for at, n in enumerate((70, 50))
    )


def test_one_heavy_table_bounds_whole_tables_but_not_rows() -> None:
    module = tables(1000, 10, 10)
    whole = BalancedPlanner({"dp": 4}).build_plan(module).certificate
    rows = BalancedPlanner({"dp": 4}, cut="rows").build_plan(module)
    assert whole is not None
    assert (whole.objective, whole.gap) == (8000, 0)
    assert rows.certificate is not None
    assert rows.certificate.objective == 255 * 8
    assert rows.validate(module) == ()


def test_dealing_is_near_the_best_and_never_worse_than_four_thirds() -> None:
    rng = random.Random(0)
    for _ in range(60):
        num_ranks = rng.randint(2, 3)
        costs = [rng.randint(1, 30) for _ in range(rng.randint(2, 7))]
        owner = deal([Group((str(at),), cost) for at, cost in enumerate(costs)], num_ranks)
        load = max(sum(c for c, o in zip(costs, owner, strict=True) if o == r) for r in range(num_ranks))
        best = min(
            max(sum(c for c, o in zip(costs, assignment, strict=True) if o == r) for r in range(num_ranks))
            for assignment in itertools.product(range(num_ranks), repeat=len(costs))
        )
        assert best <= load <= best * 4 / 3


def test_shares_of_rows_are_equal_to_a_row() -> None:
    rng = random.Random(1)
    for _ in range(50):
        rows = {f"t{at}": rng.choice([0, 1, 7, 100, 1000]) for at in range(rng.randint(1, 6))}
        num_ranks = rng.randint(1, 8)
        found = rows_by_share(rows, {name: float(n) for name, n in rows.items()}, num_ranks)
        assert {name: sum(parts) for name, parts in found.items()} == rows
        loads = [sum(parts[rank] for parts in found.values()) for rank in range(num_ranks)]
        assert max(loads) - min(loads) <= 2


def test_costs_and_groups() -> None:
    module = tables(10, 10, 10, 10)
    lookups = {"t0.weight": 9.0, "t1.weight": 1.0, "t2.weight": 1.0, "t3.weight": 7.0}
    plan = BalancedPlanner({"dp": 2}, cost=lambda name, table: lookups[name]).build_plan(module)
    assert plan.certificate is not None
    assert (plan.certificate.objective, plan.certificate.unit) == (9.0, "cost")
    together = BalancedPlanner({"dp": 2}, colocate=[["t0.*", "t3.*"]]).build_plan(module).resolve(module)
    assert together["t0.weight"] == together["t3.weight"] != together["t1.weight"]
    with pytest.raises(PlanError, match="duplicate-name"):
        BalancedPlanner({"dp": 2}, colocate=[["t0.*"], ["t0.*", "t1.*"]]).build_plan(module)
    with pytest.raises(PlanError, match="invalid-argument"):
        BalancedPlanner({"dp": 2}, colocate=[["t0.*"]], cut="rows")
    with pytest.raises(PlanError, match="invalid-argument"):
        BalancedPlanner({"dp": 2}, cost=lambda name, table: -1.0).build_plan(module)
    with pytest.raises(PlanError, match="nothing-to-optimize"):
        BalancedPlanner({"dp": 2}).build_plan(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("limit", "fits"),
    [
        (800, ["memory_limit=880", "cut='rows', cost='bytes' on the same ranks"]),
        (100, ["memory_limit=880", "dp=17 with cut='rows'"]),
        (4, ["memory_limit=880"]),
    ],
)
def test_what_does_not_fit_says_by_how_much_where_and_what_would(limit: int, fits: list[str]) -> None:
    module = tables(110, 90)
    with pytest.raises(PlanError) as error:
        BalancedPlanner({"dp": 2}, memory_limit=limit).build_plan(module)
    (problem,) = error.value.problems
    assert problem.code == "does-not-fit"
    assert "place 0" in problem.found
    assert f"{880 - limit:,} more" in problem.found
    for change in fits:
        assert change in problem.hint
    options: dict[str, Any] = {"memory_limit": 880}
    assert BalancedPlanner({"dp": 2}, **options).build_plan(module).certificate is not None
    assert BalancedPlanner({"dp": 2}, cut="rows", memory_limit=808).build_plan(module).certificate is not None
