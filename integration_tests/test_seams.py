"""Calls from one package into another raise the error of the package that the user called."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import dp_partition
import pytest
import shard_reshard
import shard_spec
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.ranks(2)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _marked_by_shard_spec(mesh: DeviceMesh) -> torch.Tensor:
    model = _model()
    parameter = model.get_parameter("0.weight")
    shard_spec.apply_plan(model, mesh, shard_spec.ShardingPlan({"0.weight": "tp:S(0)"}, mesh={"tp": 2}, strict=False))
    return parameter


def _marked_by_tp_styles(mesh: DeviceMesh) -> torch.Tensor:
    model = _model()
    parameter = model.get_parameter("0.weight")
    tp_styles.apply_plan(model, mesh, {"0": tp_styles.ColwiseParallel(), "2": tp_styles.RowwiseParallel()})
    return parameter


def _marked_by_the_bridge(mesh: DeviceMesh) -> torch.Tensor:
    model = _model()
    parameter = nn.Parameter(distribute_tensor(model.get_parameter("0.weight").detach(), mesh, [Shard(0)]))
    model.get_submodule("0").register_parameter("weight", parameter)
    tp_ddp_bridge.pre_dp_module_transform(model)
    return parameter


def _marked_by_dp_partition(mesh: DeviceMesh) -> torch.Tensor:
    model = _model()
    parameter = model.get_parameter("0.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    dp_partition.compile(train_step, mesh=mesh, style="fully_shard")(model, optimizer, torch.ones(4, 4))
    return parameter


PACKAGES = {
    package.__name__: package for package in (shard_spec, shard_reshard, tp_styles, dp_partition, tp_ddp_bridge)
}
MARKERS: dict[str, Callable[[DeviceMesh], torch.Tensor]] = {
    "shard_spec": _marked_by_shard_spec,
    "tp_styles": _marked_by_tp_styles,
    "tp_ddp_bridge": _marked_by_the_bridge,
    "dp_partition": _marked_by_dp_partition,
}


def _unscaled(parameter: torch.Tensor) -> None:
    scaler = tp_ddp_bridge.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


READERS: dict[str, tuple[ModuleType, Callable[[torch.Tensor], Any]]] = {
    "tp_styles.clip_grad_norm_": (tp_styles, lambda parameter: tp_styles.clip_grad_norm_([parameter], 1.0)),
    "clip_grad_norm_": (tp_ddp_bridge, lambda parameter: tp_ddp_bridge.clip_grad_norm_([parameter], 1.0)),
    "grad_norm": (tp_ddp_bridge, lambda parameter: tp_ddp_bridge.grad_norm([parameter])),
    "GradScaler": (tp_ddp_bridge, _unscaled),
}


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("marks", MARKERS)
def test_a_gradient_that_another_package_marked(ranks: Ranks, reads: str, marks: str) -> None:
    (caller, read), marker = READERS[reads], PACKAGES[marks]
    parameter = MARKERS[marks](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with pytest.raises(marker.PlanError, match="parameter-replaced"):
        _ = parameter.grad
    with pytest.raises(caller.PlanError) as caught:
        read(parameter)
    assert [problem.code for problem in caught.value.problems] == ["parameter-replaced"]


def _sharding_plan(entry: str) -> shard_spec.ShardingPlan:
    return shard_spec.ShardingPlan({entry: "tp:S(0)"}, mesh={"tp": 2})


def _unknown_name(mesh: DeviceMesh) -> Any:
    return tp_styles.apply_sharding_plan(_model(), mesh, _sharding_plan("0.wieght"))


def _unknown_name_converted(mesh: DeviceMesh) -> Any:
    return tp_styles.from_sharding_plan(_sharding_plan("0.wieght"), _model())


def _wrong_layout_text(mesh: DeviceMesh) -> Any:
    return shard_reshard.plan_reshard((8, 4), torch.float32, "tp=2: S(7)", "tp=2: R")


CALLS: dict[str, tuple[ModuleType, Callable[[DeviceMesh], Any]]] = {
    "apply_sharding_plan": (tp_styles, _unknown_name),
    "from_sharding_plan": (tp_styles, _unknown_name_converted),
    "plan_reshard": (shard_reshard, _wrong_layout_text),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_calls_shard_spec(ranks: Ranks, name: str) -> None:
    caller, call = CALLS[name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(caller.PlanError) as caught:
        call(mesh)
    assert caught.value.problems
    assert isinstance(caught.value, ValueError)
