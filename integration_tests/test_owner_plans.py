"""Memory and bytes of WholeMatrices by shard-spec, beside shard-reshard's plan of owners and a recorded step."""

from __future__ import annotations

from typing import Any

import pytest
import shard_reshard
import shard_spec
import torch
from ranktest import Ranks
from shard_spec.planners import ExpertParallelPlanner, FullyShardPlanner
from torch import nn
from torch.distributed.fsdp import fully_shard

SIZES = ((48, 32), (32, 48), (7, 5), (64, 16), (5, 24, 8), (3,))


class Weights(nn.Module):
    def __init__(self, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number, size in enumerate(sizes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum((each * x).square().sum() for each in self.parameters())  # type: ignore[assignment]
        return total


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rows": ({"fsdp": 4}, {"w*": "fsdp:S(0)"}),
    "replicas": ({"dp": 2, "fsdp": 3}, {"w{0,1,2,3,4}": "fsdp:S(0)"}),
    "columns": ({"tp": 3}, {"w{0,1,2,3}": "tp:S(1)", "w4": "tp:S(0)"}),
    "both": ({"fsdp": 2, "tp": 2}, {"w{0,1,3}": "fsdp:S(0), tp:S(1)", "w4": "fsdp:S(0)"}),
    "full": ({"dp": 3}, {}),
    "stages": ({"pp": 2, "dp": 2}, {"w{0,2,4}": "dp:S(0) @ pp:0", "w{1,3,5}": "@ pp:1"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_owners_and_bytes_are_those_of_the_other_package(name: str) -> None:
    axes, rules = LAYOUTS[name]
    model = Weights()
    plan = shard_spec.ShardingPlan(rules, mesh=axes, axis_roles={"tp": "model"} if "tp" in axes else None)
    shapes = {key: tuple(each.shape) for key, each in model.named_parameters()}
    layouts = {key: plan.resolve(model)[key] for key in shapes}
    owners = shard_reshard.plan_owners(shapes, plan.mesh.world_size, layouts)  # type: ignore[union-attr]  # it has one
    memory = plan.memory(model, optimizer="whole-momentum")
    assert memory.parts["master"] == owners.owned_bytes
    moved = [each for each in plan.communication(model, optimizer="whole-momentum").transfers if each.name == "owners"]
    total = sum(each.sent_bytes for each in moved) * owners.world_size
    assert total == pytest.approx(owners.lower_bound, abs=2 * owners.world_size)
    assert len(owners.matrices) == 10


def test_experts_stay_on_ranks_that_hold_them() -> None:
    model = Weights(((8, 24, 8), (8, 16, 8), (64, 16)))
    plan = ExpertParallelPlanner({"ep": 4}).build_plan(model)
    shapes = {key: tuple(each.shape) for key, each in model.named_parameters()}
    owners = shard_reshard.plan_owners(shapes, 4, {key: plan.resolve(model)[key] for key in shapes})
    assert plan.memory(model, optimizer="whole-sgd").parts["master"] == owners.owned_bytes
    assert all(there == back == 0 for there, back in (owners.sent or ())[:16])  # the experts' own


@pytest.mark.ranks(2)
def test_a_recorded_step_has_the_bytes_and_the_state(ranks: Ranks) -> None:
    model = Weights()
    plan = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(model)
    rules = {"w{0,1,2,3,4}": "whole-momentum", "**": "sgd"}
    memory, moved = plan.memory(model, optimizer=rules), plan.communication(model, optimizer=rules)
    fully_shard(model, mesh=ranks.mesh((2,), ("fsdp",)))
    optimizer = shard_reshard.WholeMatrices(
        model.named_parameters(),
        {"w[0-4]": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)},
        in_shards=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    for _ in range(5):
        model(torch.ones(())).backward()
        with ranks.record() as log:
            optimizer.step()
        optimizer.zero_grad()
    sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
    counted = sum(each.sent_bytes for each in moved.transfers if each.name == "owners")
    assert sum(ranks.gather(sent)) == pytest.approx(2 * counted, abs=4)
    state = optimizer.state_dict()["state"]
    held = sum(value.nbytes for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor))
    masters = sum(value["momentum_buffer"].nbytes for value in state.values() if "momentum_buffer" in value)
    assert masters == memory.parts["master"][ranks.rank]
    assert held <= memory.parts["optimizer"][ranks.rank] <= held + memory.parts["parameters"][ranks.rank]
