"""A peer that died, or never makes the call, is an error that names call and rank, in all five packages."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import dp_partition
import pytest
import shard_reshard
import shard_spec
import torch
import torch.distributed as dist
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _apply_plan(mesh: DeviceMesh) -> object:
    plan = shard_spec.ShardingPlan({"0.weight": "x:S(0)"}, mesh={"x": 2})
    return shard_spec.apply_plan(_model(), mesh, plan)


def _reshard(mesh: DeviceMesh) -> object:
    group = mesh.get_group()
    return shard_reshard.reshard(torch.ones(4, 8), "x=2: x:S(0)", "x=2: x:S(1)", shape=(8, 8), group=group)


def _apply_styles(mesh: DeviceMesh) -> object:
    return tp_styles.apply_plan(_model(), mesh, {"0": tp_styles.ColwiseParallel(), "2": tp_styles.RowwiseParallel()})


def _compiled_step(mesh: DeviceMesh) -> object:
    model = _model()
    step = dp_partition.compile(_train, mesh=mesh)
    return step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8))


def _wrap_ddp(mesh: DeviceMesh) -> object:
    return tp_ddp_bridge.wrap_ddp(_model(), group=mesh.get_group())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("call", [_apply_plan, _reshard, _apply_styles, _compiled_step, _wrap_ddp])
def test_a_peer_that_never_comes(ranks: Ranks, call: Callable[[DeviceMesh], Any]) -> None:
    pairs = [[rank, rank + 1] for rank in range(0, ranks.world_size, 2)]
    group, _ = dist.new_subgroups_by_enumeration(pairs, timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("x",))
    if ranks.rank % 2 == 0:
        with pytest.raises(RuntimeError, match=rf"\w+.*rank {ranks.rank}\b(?s:.*)rank died,? or made no"):
            call(mesh)
    dist.barrier()
