"""Optimizers whose state lies on one rank a matrix (WholeMatrices) or a parameter (ZeRO-1), against real states."""

import functools
import warnings
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_spec import FullyShardPlanner, MegatronPlanner, MeshSpec, PlanError, ShardingPlan, compose
from shard_spec.cli import main
from shard_spec.planners import ExpertParallelPlanner
from torch import nn


class Net(nn.Module):
    """Matrices of several sizes, a stack of them, vectors, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.table.weight.requires_grad_(False)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.experts = nn.Parameter(torch.randn(6, 16, 8))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        mixed = (x.flatten(0, 1) @ self.experts).sum(0) @ torch.ones(8, 16, device=x.device)
        x = x + mixed.view_as(x)
        out: torch.Tensor = self.head(x)
        return out.sum()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of `Net` as parameters of their own: each expert of the stack is one."""
    own = [each for each in model.parameters() if each.requires_grad and each.dim() > 1]
    parts = [part for each in own for part in (each.unbind(0) if each.dim() == 3 else [each])]
    return [nn.Parameter(part.detach().clone()) for part in parts]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


PLANS = {
    "fsdp": FullyShardPlanner({"fsdp": 4}, "fsdp"),
    "hsdp": FullyShardPlanner({"dp": 2, "fsdp": 2}, "fsdp"),
    "2-D": compose(MegatronPlanner(m := MeshSpec({"fsdp": 2, "tp": 2})), FullyShardPlanner(m, "fsdp")),
    "experts": compose(ExpertParallelPlanner(e := MeshSpec({"dp": 2, "ep": 2})), FullyShardPlanner(e, ("dp", "ep"))),
}
KINDS: dict[str, Any] = {
    "whole-muon": torch.optim.Muon,
    "whole-adafactor": torch.optim.Adafactor,
    "whole-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("name", KINDS)
def test_owners_together_hold_the_state_of_one_process(layout: str, name: str) -> None:
    model = Net()
    plan = PLANS[layout].build_plan(model)
    own = matrices(model)
    optimizer = KINDS[name](own)
    for each in own:
        each.grad = torch.randn_like(each)
    optimizer.step()
    rules = {"{up,down,head}.weight": name, "experts": name, "**": "sgd"}
    memory, plain = plan.memory(model, optimizer=rules), plan.memory(model, optimizer="sgd")
    assert sum(memory.parts["master"]) == sum(each.nbytes for each in own)
    sums = sum(memory.parts["optimizer"]) - state_bytes(optimizer)  # of rows and columns, to see writes
    local = sum(plain.parts["parameters"])
    assert 0 < sums < local
    assert memory.parts["parameters"] == plain.parts["parameters"]
    assert memory.optimizer == f"{name} + sgd"
    assert "9 matrices on owner ranks" in str(memory)
    assert "assumed: all ranks are owners" in str(memory)
    assert max(memory.parts["master"]) < 0.6 * sum(memory.parts["master"])


def test_gradients_go_to_owners_and_values_come_back() -> None:
    model = Net()
    plan = PLANS["fsdp"].build_plan(model)
    rules = {"{up,down,head}.weight": "whole-muon", "**": "adamw"}
    moved = [each for each in plan.communication(model, optimizer=rules).transfers if each.name == "owners"]
    assert [each.what for each in moved] == ["gradients", "parameters"]
    elements = 2 * 16 * 64 + 16 * 40
    for each in moved:  # of each matrix 3 of 4 ranks send their quarter, and get it back
        assert each.sent_bytes * 4 == pytest.approx(elements * 4 * 3 / 4, abs=8)
    assert not any(each.name == "owners" for each in plan.communication(model, optimizer="adamw").transfers)


def test_a_step_makes_room_for_new_values() -> None:
    model, ids = Net(), torch.zeros(1, 2, dtype=torch.long)
    plan = ShardingPlan({}, mesh={"dp": 4})
    rules = {"{up,down,head}.weight": "whole-muon", "**": "sgd"}
    memory = plan.memory(model, ids, optimizer=rules)
    staged = (2 * 16 * 64 + 16 * 40) * 4
    assert memory.moment == "optimizer"
    assert memory.on(0)["optimizer step"] >= staged


def test_an_instance_or_an_unknown_name_names_the_way_on() -> None:
    with pytest.raises(PlanError, match="whole-NAME"):
        PLANS["fsdp"].build_plan(Net()).memory(Net(), optimizer="whole-nothing")
    with pytest.raises(PlanError, match="WholeMatrices"):
        PLANS["fsdp"].build_plan(Net()).memory(Net(), optimizer={"*.weight": "adafactor", "**": "sgd"})


@pytest.mark.ranks(2, 3)
def test_zero_1_is_torchs_zero_redundancy_optimizer(ranks: Ranks) -> None:
    with warnings.catch_warnings():  # of modules beside it
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = Net()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.1)
    for _ in range(5):
        for each in trained:
            each.grad = torch.ones_like(each)
        optimizer.step()
    real = ranks.gather(state_bytes(optimizer.optim))
    plan = ShardingPlan({}, mesh={"dp": ranks.world_size})
    memory = plan.memory(model, zero=1)
    assert list(memory.parts["optimizer"]) == real
    assert len(set(real)) > 1
    assert sum(real) == plan.memory(model).on(0)["optimizer"]
    moved = plan.communication(model, zero=1)
    size = sum(each.nbytes for each in trained)
    assert moved.by_axis()["dp"]["parameters"] == pytest.approx(size * (1 - 1 / ranks.world_size))
    assert "ZeroRedundancyOptimizer" in str(memory)


@pytest.mark.parametrize(
    ("plan", "zero", "message"),
    [
        (ShardingPlan({}, mesh={"dp": 2}), 2, "reshard_after_forward=False"),
        (ShardingPlan({}, mesh={"dp": 2}), 3, "FullyShardPlanner"),
        (ShardingPlan({}, mesh={"dp": 2}), True, "1, or None"),
        (PLANS["fsdp"].build_plan(Net()), 1, "shares out the state of replicas"),
        (ShardingPlan({}, mesh={"tp": 2}), 1, "shares out the state of replicas"),
    ],
)
def test_other_stages_of_zero_are_refused_with_a_way_on(plan: ShardingPlan, zero: Any, message: str) -> None:
    for call in (plan.memory, plan.communication):
        with pytest.raises(PlanError, match=message):
            call(Net(), zero=zero)


def test_the_command_line_takes_optimizers_by_group(capsys: Any) -> None:
    arguments = ["plan", "test_owners:Net", "--mesh", "fsdp=4"]
    groups = ["--optimizer", "{up,down,head}.weight=whole-muon", "--optimizer", "**=adamw"]
    assert main([*arguments, *groups]) == 0
    text = capsys.readouterr().out
    assert "optimizer: whole-muon + adamw" in text
    assert "3 matrices on owner ranks" in text
    assert main([*arguments, "--optimizer", "adamw", "--optimizer", "sgd"]) == 2
    assert "PATTERN=NAME" in capsys.readouterr().err
