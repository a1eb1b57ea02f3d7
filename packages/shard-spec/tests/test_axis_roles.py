"""Roles of axes: planners pass theirs on, callers declare, names are an assumption that is printed; else a refusal."""

import functools
import itertools
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_spec import FullyShardPlanner, Layout, MegatronPlanner, MeshSpec, PlanError, ShardingPlan, compose
from shard_spec.cli import main
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, dim: int = 16, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def net() -> nn.Module:
    with torch.device("meta"):
        return Net()


def costs(plan: ShardingPlan, **step: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Everything that a step's axes decide, without names of axes; and what was assumed about them."""
    memory, communication = plan.cost(net(), (8, 32), **step)  # one simulated step
    moved = [(t.op, t.what, t.name, t.full_bytes, t.count, t.group_size) for t in communication.transfers]
    return (dict(memory.parts), memory.moment, moved), memory.assumptions


def numbers(plan: ShardingPlan, **step: Any) -> tuple[Any, ...]:
    return costs(plan, **step)[0]


@functools.cache
def of_fsdp() -> tuple[Any, ...]:
    return numbers(FullyShardPlanner({"fsdp": 4}, "fsdp").build_plan(net()))


@pytest.mark.parametrize("name", ["zero", "world", "dp_shard_in_ep", "x", "tp", "pp", "ep", "cp"])
def test_a_planners_axis_counts_alike_under_every_name(name: str) -> None:
    plan = FullyShardPlanner({name: 4}, name).build_plan(net())
    copies = {
        "itself": plan,
        "JSON": ShardingPlan.from_json(plan.to_json()),
        "pickle": pickle.loads(pickle.dumps(plan)),
        "compact": plan.compact(net()),
        "merged": ShardingPlan({}, mesh={name: 4}) | plan,
        "dict": ShardingPlan.from_dict(json.loads(plan.to_json())),
    }
    for way, each in copies.items():
        assert costs(each) == (of_fsdp(), ()), way  # a planner knows its axis: nothing is assumed
        assert each.axis_roles == {name: "data"}, way
    assert plan.on_mesh(MeshSpec({name: 2})).axis_roles == {name: "data"}
    assert plan.digest != ShardingPlan(plan.plan, mesh={name: 4}).digest


def test_both_planners_axes_count_alike_under_every_pair_of_names() -> None:
    def plan(shard: str, model: str) -> ShardingPlan:
        mesh = MeshSpec({shard: 2, model: 2})
        return compose(MegatronPlanner(mesh, model), FullyShardPlanner(mesh, shard)).build_plan(net())

    expected = numbers(plan("fsdp", "tp"))
    names = ["a", "b", "dp", "tp", "model", "ep"]
    pairs = random.Random(0).sample(list(itertools.permutations(names, 2)), 12)
    for shard, model in pairs:
        assert numbers(plan(shard, model)) == expected, (shard, model)


def test_an_axis_of_no_role_is_refused_and_a_declaration_is_the_way_on() -> None:
    rules = {"**.weight": "zero:S(0)"}
    plan = ShardingPlan(rules, mesh={"zero": 4})
    for call in (plan.memory, plan.activations, plan.communication):
        with pytest.raises(PlanError) as caught:
            call(net(), (8, 32))
        (problem,) = caught.value.problems
        assert (problem.code, problem.axis) == ("undeclared-axis", "zero")
        assert "data_axes=" in problem.hint
    with pytest.raises(PlanError, match="undeclared-axis"):
        plan.communication(net())
    assert plan.memory(net()).verdict("1GiB").startswith("fits")  # the state does not depend on it
    by_name = ShardingPlan({"**.weight": "dp:S(0)"}, mesh={"dp": 4})
    declared = ShardingPlan(rules, mesh={"zero": 4}, axis_roles={"zero": "data"})
    assert numbers(plan, data_axes="zero") == numbers(by_name) == numbers(declared)
    assert numbers(plan, data_axes=[]) == numbers(ShardingPlan({"**.weight": "tp:S(0)"}, mesh={"tp": 4}))
    assert ShardingPlan(rules, mesh={"zero": 1}).memory(net(), (8, 32)).assumptions == ()  # one rank: no role needed
    hybrid = FullyShardPlanner({"replicas": 2, "shards": 4}, "shards").build_plan(net())
    with pytest.raises(PlanError, match=r"data_axes=\['shards', 'replicas'\] if different"):
        hybrid.memory(net(), (8, 32))
    with pytest.raises(PlanError, match="the plan knows shards as a data axis"):
        hybrid.memory(net(), (8, 32), data_axes="replicas")
    known = FullyShardPlanner({"dp_replicate": 2, "dp_shard": 4}, "dp_shard").build_plan(net())
    assert numbers(hybrid, data_axes=["replicas", "shards"]) == numbers(known)
    both = ShardingPlan({}, mesh={"replicas": 2, "shards": 2, "dp": 2})
    with pytest.raises(PlanError) as caught:
        both.communication(net(), (8, 32))
    assert [problem.axis for problem in caught.value.problems] == ["replicas", "shards"]


def test_what_a_name_says_is_printed_beside_every_number() -> None:
    plan = ShardingPlan({"**.weight": "dp:S(0)"}, mesh={"dp": 4, "tp": 2})
    memory = plan.memory(net(), (8, 32))
    (line,) = memory.assumptions
    assert line.startswith("assumed from the name: dp is a data axis, tp is a model axis")
    texts = [str(memory), memory.verdict(2**30), memory.verdict(1), str(plan.activations(net(), (8, 32)))]
    texts += [str(plan.communication(net(), (8, 32))), str(plan.communication(net()))]
    assert all(line in text for text in texts)
    assert json.loads(memory.to_json())["assumptions"] == [line]
    assert "assumed" not in str(plan.memory(net()))
    assert "assumed" not in str(plan.memory(net(), (8, 32), data_axes="dp"))


def test_planners_that_contradict_each_other_about_an_axis_are_refused() -> None:
    class Norms(FullyShardPlanner):
        def decide(self, module: nn.Module, given: Any) -> Any:
            return type(super().decide(module, given))({}, axis_roles={"tp": "data"})

    mesh = MeshSpec({"dp": 2, "tp": 2})
    with pytest.raises(PlanError, match="a model axis of one planner, a data axis of another"):
        compose(MegatronPlanner(mesh), Norms(mesh, "dp")).build_plan(net())


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"dp": "batch"}, "one of data, model, expert, context, stage"),
        ({"fsdp": "data"}, "the mesh has the axes dp"),
        ([["dp", "data"], ["dp", "model"]], "names an axis twice"),
        ([["dp"]], "no list of"),
        ([["dp", 3]], "no list of"),
        (7, "no list of"),
    ],
)
def test_wrong_roles_are_refused_in_plans_and_files(roles: Any, message: str) -> None:
    document = json.loads(ShardingPlan({}, mesh={"dp": 2}).to_json())
    listed = [list(item) for item in roles.items()] if isinstance(roles, dict) else roles
    with pytest.raises(PlanError, match=message):
        ShardingPlan.from_json(json.dumps({**document, "axis_roles": listed}))
    if isinstance(roles, dict):
        plan = ShardingPlan({}, mesh={"dp": 2}, axis_roles=roles)
        assert any(message in str(problem) for problem in plan.problems)
        assert any(message in str(problem) for problem in plan.validate(net()))
    else:
        with pytest.raises(TypeError, match="axis_roles is a mapping"):
            ShardingPlan({}, mesh={"dp": 2}, axis_roles=roles)


def test_a_batch_is_divided_along_data_axes_without_a_rest() -> None:
    mesh = MeshSpec({"dp": 2, "cp": 4})
    plan = ShardingPlan({}, mesh=mesh)
    local = ShardingPlan({}, mesh={"dp": 1}).activations(net(), (3, 5))
    assert plan.activations(net(), (6, 20)).peak_bytes == local.peak_bytes
    with pytest.raises(PlanError) as caught:
        plan.activations(net(), (5, 21))
    assert [(each.code, each.axis) for each in caught.value.problems] == [
        ("does-not-divide", "dp"),
        ("does-not-divide", "cp"),
    ]
    assert "multiple of 4" in caught.value.problems[1].hint


def test_vocabulary_parallel_loss_needs_sharded_logits() -> None:
    with pytest.raises(PlanError, match="shards no logits"):
        FullyShardPlanner({"dp": 2}).build_plan(net()).memory(net(), (4, 8), loss="vocab-parallel")
    tied: Any = net()
    tied.head.weight = tied.embed.weight
    plan = MegatronPlanner({"tp": 2}).build_plan(tied)
    full = plan.activations(tied, (4, 8))
    sharded = plan.activations(tied, (4, 8), loss="vocab-parallel")
    assert sharded.loss_bytes < 0.6 * full.loss_bytes
    gathers = [
        plan.communication(tied, (4, 8), loss=loss).count("tp", "all_gather")
        for loss in ("causal-lm", "vocab-parallel")
    ]
    assert gathers == [1, 0]


def test_gradients_are_not_left_out_of_a_step_that_makes_them() -> None:
    plan = ShardingPlan({}, mesh={"dp": 1})
    with pytest.raises(PlanError, match="conflicting-arguments"):
        plan.memory(net(), (4, 8), grads=False)
    assert plan.memory(net(), grads=False).on(0)["gradients"] == 0


def test_limits_are_bytes_or_text_with_a_unit() -> None:
    memory = ShardingPlan({}, mesh={"dp": 1}).memory(net())
    for limit, number in (("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("0.5tb", 5 * 10**11), ("1234B", 1234)):
        assert memory.verdict(limit) == memory.verdict(number)
    wrong: Any
    for wrong in ("80", "80 giga", "", "GiB", -1, 1.5, True, None):
        with pytest.raises(PlanError, match="write the unit"):
            memory.verdict(wrong)


def test_a_world_with_other_ranks_than_the_plans_is_a_problem() -> None:
    plan = ShardingPlan({}, mesh={"dp": 8})
    assert plan.validate(net(), world_size=8) == ()
    for world, code in ((4, "mesh-too-large"), (16, "mesh-mismatch")):
        (problem,) = plan.validate(net(), world_size=world)
        assert problem.code == code
    assert "8-15" in plan.validate(net(), world_size=16)[0].found
    part = ShardingPlan({}, mesh=MeshSpec({"dp": 4}, ranks=range(4, 8)))
    assert "0-3" in part.validate(net(), world_size=8)[0].found


def test_a_plan_of_another_mesh_or_model_is_one_problem() -> None:
    plan = MegatronPlanner({"tp": 2}).build_plan(net())
    texts = {name: str(layout) for name, layout in plan.plan.items()}
    (problem,) = ShardingPlan(texts, mesh={"dp": 2}).validate(net())
    assert (problem.code, problem.axis) == ("unknown-axis", "tp")
    assert f"so for all {len(plan.plan)}" in problem.found
    (problem,) = plan.validate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert problem.code == "model-mismatch"
    wide = {name: Layout(MeshSpec({"tp": 4}), str(text)) for name, text in plan.plan.items()}
    (problem,) = ShardingPlan(wide, mesh={"tp": 2}).validate(net())
    assert problem.code == "mesh-mismatch"


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    return f"{__name__}:Net"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mesh", "zero=2", "--planner", "fsdp", "--memory-limit", "80"], "write the unit"),
        (["--mesh", "dp=4", "--batch", "6x8"], "6 sequences over 4 ranks of dp"),
        (["--mesh", "dp=4", "--batch", "8x8", "--loss", "vocab-parallel"], "shards no logits"),
        (["--mesh", "dp=4", "--batch", "0x8"], "write sequences x length"),
        (["--mesh", "dp=4", "--loss", "none"], "--loss has no effect without --batch"),
        (["--mesh", "dp=4", "--checkpointing"], "--checkpointing has no effect without --batch"),
        (["--mesh", "dp=4,other=2", "--planner", "fsdp"], "[undeclared-axis] axis 'other'"),
        (["--mesh", "dp=4", "--planner", "fsdp", "--data-axes", "fsdp"], "unknown-axis"),
    ],
)
def test_wrong_options_are_refused_by_name(factory: str, more: list[str], message: str, capsys: Any) -> None:
    assert main(["plan", factory, *more]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_passes_roles_on(factory: str, capsys: Any) -> None:
    def memory(*arguments: str) -> Any:
        assert main([*arguments, "--batch", "8x32", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["memory"]

    expected = memory("plan", factory, "--mesh", "dp=4", "--planner", "fsdp")
    assert main(["plan", factory, "--mesh", "zero=4", "--planner", "fsdp", "--out", "zero.json"]) == 0
    capsys.readouterr()
    assert memory("check", factory, "zero.json") == expected
    Path("plain.json").write_text(ShardingPlan({"**.weight": "S(0)"}, mesh={"zero": 4}).to_json())
    assert main(["check", factory, "plain.json", "--batch", "8x32"]) == 2
    assert "undeclared-axis" in capsys.readouterr().err
    assert memory("check", factory, "plain.json", "--data-axes", "zero")["assumptions"] == []
    assert memory("plan", factory, "--mesh", "tp=1,zero=4", "--data-axes", "zero") == expected


def test_an_unknown_tensor_is_no_replicated_one(factory: str, capsys: Any) -> None:
    assert main(["plan", factory, "--mesh", "tp=2", "--out", "plan.json"]) == 0
    capsys.readouterr()
    for name, near in (("dwn.weight", "blocks.*.down.weight"), ("blocks.1.dwn.weight", "blocks.*.down.weight")):
        assert main(["explain", "plan.json", name]) == 1
        assert f"did you mean {near}" in capsys.readouterr().err
    assert main(["explain", "plan.json", "dwn.weight", "--model", factory]) == 1
    assert "did you mean blocks.0.down.weight" in capsys.readouterr().err
    assert main(["explain", "plan.json", "blocks.1.down.weight"]) == 0


def test_an_import_that_fails_is_named(factory: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "half_a_module.py").write_text("import numpy\nimport no_such_dependency.inner\n")
    for source, cause in (
        ("nosuch:make", "nosuch"),
        ("half_a_module:make", "no_such_dependency"),
        ("json:make", "make"),
    ):
        assert main(["plan", source, "--mesh", "dp=2"]) == 2
        assert cause in capsys.readouterr().err.replace(repr(source), "")


def test_hints_leave_out_the_options_already_given(factory: str, capsys: Any) -> None:
    command = ["plan", factory, "--mesh", "tp=2", "--batch", "8x32", "--memory-limit", "1B", "--optimizer", "sgd"]
    state = 2 * sum(each.nbytes for each in Net().parameters())
    command[command.index("1B")] = f"{state}B"
    assert main(command) == 1
    hint = capsys.readouterr().out
    assert "--checkpointing" in hint
    assert "vocab-parallel" in hint
    assert main([*command, "--checkpointing", "--loss", "vocab-parallel"]) == 1
    hint = capsys.readouterr().out
    assert "try a smaller batch, or more ranks" in hint
