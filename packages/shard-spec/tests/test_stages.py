"""Stages of a pipeline in a plan: empty boxes elsewhere, memory and bytes by stage, copies of tied weights."""

from typing import Any

import pytest
import torch
from shard_spec import FullyShardPlanner, Layout, MegatronPlanner, MeshSpec, PlanError, Shard, ShardingPlan, compose
from shard_spec.cli import main
from shard_spec.layout.placements import StageShard
from shard_spec.planners import StagePlanner
from torch import nn

HIDDEN, VOCAB, LAYERS, LENGTH = 32, 128, 5, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


MESH = MeshSpec({"pp": 3, "dp": 2})


def test_a_stage_holds_all_of_a_tensor_and_the_others_nothing() -> None:
    layout = Layout(MESH, "dp:S(0) @ pp:1")
    assert layout.specs == (StageShard(1), Layout(MESH, "dp:S(0)").specs[1])
    assert str(layout) == "dp:S(0) @ pp:1"
    assert Layout.parse(str(layout), MESH) == layout == Layout(MESH, {"pp": StageShard(1), "dp": Shard(0)})
    assert Layout(MESH, "S(0) @ pp:1") == layout  # one placement for each other axis
    assert [layout.local_shape(rank, (6, 4)) for rank in range(6)] == [(0, 4), (0, 4), (3, 4), (3, 4), (0, 4), (0, 4)]
    assert [len(layout.boxes(rank, (6, 4))) for rank in range(6)] == [0, 0, 1, 1, 0, 0]
    assert [layout.is_present(rank) for rank in range(6)] == [False, False, True, True, False, False]
    assert layout.stages == {"pp": 1}
    assert layout.first_rank == 2
    only = Layout(MESH, "@ pp:2")
    assert str(only) == "dp:R @ pp:2"
    assert [only.is_primary(rank) for rank in range(6)] == [True, False] * 3
    with pytest.raises(PlanError, match="stage 3 of 3"):
        Layout(MESH, "@ pp:3")
    for wrong in ("dp:R @ pp", "dp:R @ 1", "dp:R @ pp:x", "@ qq:0", "dp:@1(2)"):
        with pytest.raises(PlanError):
            Layout(MESH, wrong)


def test_every_element_of_a_staged_plan_lies_on_its_stage_once() -> None:
    plan = compose(StagePlanner(MESH), FullyShardPlanner(MESH, "dp")).build_plan(Model())
    assert plan.validate(Model()) == ()
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert dict(plan.axis_roles) == {"dp": "data", "pp": "stage"}
    counted = 0
    for name, parameter in Model().named_parameters():
        layout = plan.resolve(Model())[name]
        held = [sum(box.numel for box in layout.boxes(rank, tuple(parameter.shape))) for rank in range(6)]
        assert sum(held) == parameter.numel(), name
        stage = layout.stages["pp"]
        assert sum(held[2 * stage : 2 * stage + 2]) == parameter.numel(), name
        counted += 1
    assert counted == 2 * 1 + 2 + LAYERS * 6
    assert "on the ranks of stage 2 alone" in plan.explain("head.weight", Model())


def test_blocks_are_spread_evenly_or_as_asked() -> None:
    def stages(**options: Any) -> list[int]:
        layouts = StagePlanner(MESH, **options).build_plan(Model()).resolve(Model())
        return [layouts[f"blocks.{at}.up.weight"].stages["pp"] for at in range(LAYERS)]

    assert stages() == [0, 0, 1, 1, 2]
    assert stages(blocks=(1, 3, 1)) == [0, 1, 1, 1, 2]
    for blocks in ((1, 1, 1), (5, 0, 0), (3, 2)):
        with pytest.raises(PlanError, match="does-not-divide"):
            StagePlanner(MESH, blocks=blocks).build_plan(Model())


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_each_stage_is_that_of_its_layers_alone(tied: bool) -> None:
    model = Model(tied)
    plan = StagePlanner({"pp": 3}).build_plan(model)
    memory = plan.memory(model)
    block = sum(each.numel() for each in model.blocks[0].parameters()) * 4
    table, norm = VOCAB * HIDDEN * 4, 2 * HIDDEN * 4
    # A tied table is on both ends.
    assert memory.parts["parameters"] == (table + 2 * block, 2 * block, block + norm + table)
    assert memory.parts["gradients"] == memory.parts["parameters"]
    one = ShardingPlan({}, mesh={"dp": 1}).memory(model)
    copy = 3 * table + 4 if tied else 0  # two moments, the gradient and the step of the copy
    state = sum(sum(memory.parts[part]) for part in ("gradients", "optimizer"))
    assert state == one.on(0)["gradients"] + one.on(0)["optimizer"] + copy
    assert ("tied: embed.weight = head.weight has a copy" in str(memory)) == tied


class Part(nn.Module):
    """The layers that one stage of `Model` runs."""

    def __init__(self, model: Model, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.embed if first == 0 else None
        self.blocks = model.blocks[first:last]
        self.end = nn.Sequential(model.norm, model.head) if last == LAYERS else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.end is None else self.end(x)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_a_stage_are_those_of_a_step_of_its_part(checkpointing: bool) -> None:
    model, batch = Model(), (4, LENGTH)
    plan = StagePlanner({"pp": 3}).build_plan(model)
    estimate = plan.activations(model, batch, checkpointing=checkpointing)
    assert len(estimate.by_stage) == 3
    alone = ShardingPlan({}, mesh={"dp": 1})
    for (first, last), stage in zip([(0, 2), (2, 4), (4, 5)], estimate.by_stage, strict=True):
        part = Part(model, first, last)
        ids, hidden = torch.zeros(4, LENGTH, dtype=torch.long), torch.zeros(4, LENGTH, HIDDEN, requires_grad=True)
        part_estimate = alone.activations(part, ids if first == 0 else hidden, loss=None, checkpointing=checkpointing)
        received = 0 if first == 0 else hidden.nbytes  # an input of the part belongs to its caller
        if last < LAYERS:  # the loss is in the last one
            assert stage.peak_bytes == pytest.approx(part_estimate.peak_bytes + received, rel=0.1)
            if not checkpointing:  # checkpointed, the part counts its own input among what is kept
                assert stage.local_bytes == pytest.approx(part_estimate.local_bytes + received, rel=0.1)
    assert estimate.peak_bytes == max(each.peak_bytes for each in estimate.by_stage)
    assert estimate.by_stage[2].loss_bytes > 0
    assert estimate.by_stage[0].loss_bytes == 0
    memory = plan.memory(model, batch, checkpointing=checkpointing)
    assert [memory.on(rank)["activations"] for rank in range(3)] == [
        each.peak_bytes - each.loss_bytes - each.gathered_bytes for each in estimate.by_stage
    ]
    assert "for each more in flight add up to" in str(memory)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_stages_send_activations_on_and_gradients_back(tied: bool, checkpointing: bool) -> None:
    model = Model(tied)
    plan = StagePlanner({"pp": 3}).build_plan(model)
    moved = plan.communication(model, (2, LENGTH), checkpointing=checkpointing, accumulate=3)
    between = [each for each in moved.transfers if each.op == "p2p"]
    size = 2 * LENGTH * HIDDEN * 4
    assert {each.full_bytes for each in between} == {size}
    ways = sum(each.count for each in between)
    assert ways == (3 if tied else 6)  # an end sends one way, the middle stage both
    assert sum(each.sent_bytes for each in between) == ways * size
    sums = [each for each in moved.transfers if each.axis == "pp" and each.what == "gradients"]
    assert [each.full_bytes for each in sums] == ([VOCAB * HIDDEN * 4] if tied else [])
    assert "bytes are those of stage" in str(moved)


def test_stages_beside_tensor_and_data_parallel_axes() -> None:
    mesh = MeshSpec({"pp": 2, "fsdp": 2, "tp": 2})
    planner = compose(StagePlanner(mesh), MegatronPlanner(mesh), FullyShardPlanner(mesh, "fsdp"))
    model = Model()
    plan = planner.build_plan(model)
    alone = compose(*planner.planners[1:]).build_plan(model)
    memory, unstaged = plan.memory(model, (4, LENGTH)), alone.memory(model, (4, LENGTH))
    stages = [memory.on(rank)["parameters"] for rank in (0, 4)]
    assert sum(stages) == unstaged.on(0)["parameters"]
    assert max(memory.totals) < unstaged.max_bytes
    moved, everything = (each.communication(model, (4, LENGTH)) for each in (plan, alone))
    assert moved.by_axis()["fsdp"]["gradients"] < everything.by_axis()["fsdp"]["gradients"]
    assert moved.by_axis()["tp"]["activations"] < everything.by_axis()["tp"]["activations"]
    assert moved.flops < everything.flops
    layout = plan.resolve(model)["blocks.0.up.weight"]
    with pytest.raises(PlanError, match="lies on every rank of its mesh"):
        plan.to_dtensor_placements(model)
    assert str(layout) == "fsdp:S(0), tp:S(0) @ pp:0; order=tp>fsdp"


def test_the_command_line_plans_stages(capsys: Any) -> None:
    assert main(["plan", "test_stages:Model", "--mesh", "pp=2,dp=2", "--batch", "4x16", "--json"]) == 0
    text = capsys.readouterr().out
    assert '"pp:0"' not in text
    assert "dp:S(0) @ pp:0" in text
