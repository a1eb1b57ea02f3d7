"""Jobs of FSDP1: ShardedTensor values and nested optimizer state dicts are moved as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, StateDictResharder, reshard_state_dict
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

pytestmark = pytest.mark.filterwarnings("ignore")


def _trained(ranks: Ranks) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return a model of FSDP1 and its Adam after a step, and the full weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    model = FSDP(module, device_id=torch.device(ranks.device), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(2, 7, device=ranks.device)).sum().backward()
    optimizer.step()
    with FSDP.summon_full_params(model):
        full = {name: value.detach().clone() for name, value in module.named_parameters()}
    return model, optimizer, full


@pytest.mark.ranks(2, 3)
def test_sharded_state_dicts_and_the_optimizers(ranks: Ranks) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    model, optimizer, full = _trained(ranks)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state, nested = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    everywhere = f"{ranks.world_size}: R"
    moved = reshard_state_dict(state, everywhere)
    assert moved.keys() == full.keys()
    assert all(torch.equal(moved[name], full[name]) for name in full)  # some ranks have no row of the last bias
    sharded = reshard_state_dict(nested, lambda name, shape: everywhere if shape in ((), (1,)) else "rank 1")
    result = sharded.nested()
    assert result["param_groups"][0]["lr"] == 0.5
    assert sharded["param_groups.0.betas"] == (0.9, 0.999)
    assert {float(result["state"][name]["step"]) for name in full} == {1.0}
    if ranks.rank == 1:
        assert {name: tuple(result["state"][name]["exp_avg"].shape) for name in full} == {
            name: tuple(value.shape) for name, value in full.items()
        }
    # From one rank into the shards, which stay those of the state dict.
    plus = {name: value + 1 for name, value in full.items()}
    reshard_state_dict(plus, out=state)
    again = reshard_state_dict(state, everywhere)
    assert all(torch.equal(again[name], plus[name]) for name in plus)


@pytest.mark.ranks(2)
def test_values_beside_tensors_are_the_calls_own(ranks: Ranks) -> None:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.fill_(2.0)
        linear.bias.fill_(1.0)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.1)
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for lr in (0.1, 0.2, 0.2):  # a changed number in an equal call
        optimizer.param_groups[0]["lr"] = lr
        nested: Any = get_optimizer_state_dict(linear, optimizer)
        moved = reshard_state_dict(nested if ranks.rank == 0 else {}, "rank 1")
        assert moved["param_groups.0.lr"] == lr
        if ranks.rank == 1:
            assert torch.equal(moved["state.weight.exp_avg"], nested["state"]["weight"]["exp_avg"])
            assert torch.equal(moved.nested()["state"]["bias"]["exp_avg_sq"], nested["state"]["bias"]["exp_avg_sq"])
    optimizer.param_groups[0]["lr"] = 0.3 + ranks.rank
    with pytest.raises(PlanError, match=r"ranks-disagree\] param_groups\.0\.lr"):
        reshard_state_dict(get_optimizer_state_dict(linear, optimizer), "2: R")
    with pytest.raises(PlanError, match=r"wrong-type.*reshard_state_dict"):
        StateDictResharder(get_optimizer_state_dict(linear, optimizer), "2: R")


@pytest.mark.ranks(2)
def test_several_shards_of_a_rank_are_named(ranks: Ranks) -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])
    several = sharded_tensor.rand(spec, (8, 3))
    with pytest.raises(PlanError, match=r"unsupported-tensor.*2 shards.*reshard_sharded_tensor"):
        reshard_state_dict({"w": several}, "2: R")
