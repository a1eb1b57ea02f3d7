"""State dicts are global at the boundary, and go through torch.distributed.checkpoint to another tp size."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard

Mode = Literal["dtensor", "local"]


class Net(nn.Module):
    """An uneven pair, a fused weight, and two heads that four ranks hold twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = models.MLP(8, 10)
        self.fused = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.keys = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.fused(self.mlp(x)))
        return result


def plan_for(tp_size: int) -> dict[str, tp.ParallelStyle]:
    """Two key-value heads of three rows."""
    return {**PLAN, "keys": tp.FusedColwiseParallel((6,), unit=3, copies=max(tp_size // 2, 1))}


PLAN: dict[str, tp.ParallelStyle] = {
    "mlp.up": tp.ColwiseParallel(),
    "mlp.down": tp.RowwiseParallel(),
    "fused": tp.FusedColwiseParallel((16, 8), unit=4, output_layouts=Replicate()),
}


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tp.full_state_dict(model).items()}


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.ranks(2, 4)
def test_names_shapes_and_values(ranks: Ranks) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = models.seeded(Net)
    expected = copy.deepcopy(model.state_dict())
    tp.apply_plan(model, mesh, PLAN)
    with ranks.record(allow_empty=True) as log:
        state = model.state_dict()
    assert log.count() == 0
    assert list(state) == list(expected)
    assert [isinstance(value, DTensor) for value in state.values()] == [True] * 4 + [False] * 6
    assert all(value.shape == expected[name].shape for name, value in state.items())
    assert_equal(whole_state(model), expected)
    x = torch.randn(2, 8)
    before = model(x)
    for source in (expected, copy.deepcopy(model.state_dict())):  # whole tensors; what state_dict() gave
        for assign in (False, True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(source, assign=assign)
            assert torch.equal(model(x), before)
            kinds = [type(p).__name__ for p in model.parameters()]
            assert kinds[:6] == ["DTensor"] * 4 + ["ShardParameter"] * 2
    elsewhere = {
        name: DTensor.from_local(value, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        for name, value in expected.items()
        if not name.startswith(("norm", "keys"))
    }
    model.load_state_dict(elsewhere, strict=False)
    assert torch.equal(model(x), before)
    with pytest.raises(tp.PlanError, match=r"shape-mismatch.*fused.weight|fused.weight.*shape"):
        model.load_state_dict({**expected, "fused.weight": torch.zeros(3, 8)})


@pytest.mark.ranks(4)
def test_checkpoint_to_another_tp_size(ranks: Ranks, tmp_path: Path) -> None:
    """Saved at tp 4, loaded at tp 2 and at tp 1; and back."""
    folder = ranks.gather(str(tmp_path))[0]
    model = models.seeded(Net)
    expected = copy.deepcopy(model.state_dict())
    tp.apply_plan(model, ranks.mesh((4,), ("tp",)), plan_for(4))
    save({"model": model.state_dict()}, checkpoint_id=f"{folder}/four")
    square = ranks.mesh((2, 2), ("dp", "tp"))
    other = models.seeded(Net, seed=ranks.rank + 1)
    tp.apply_plan(other, square["tp"], plan_for(2))
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=f"{folder}/four")
    other.load_state_dict(state["model"])
    assert_equal(whole_state(other), expected)
    alone = models.seeded(Net, seed=9)
    state = {"model": alone.state_dict()}
    load(state, checkpoint_id=f"{folder}/four")
    assert_equal(alone.state_dict(), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    save({"model": other.state_dict()}, checkpoint_id=f"{folder}/two")
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=f"{folder}/two")
    model.load_state_dict(state["model"])
    assert_equal(whole_state(model), {name: value * 2 for name, value in expected.items()})


@pytest.mark.ranks(2)
def test_moments_of_fused_shards_resume_through_dcp(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank gets its own rows back, at the same and at another tp size; a file of one rank stays a plain one."""
    folder, mesh = ranks.gather(str(tmp_path))[0], ranks.mesh((2,), ("tp",))

    def trained(plan: dict[str, tp.ParallelStyle], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = models.seeded(Net)
        model.requires_grad_(True).get_submodule("keys").requires_grad_(False)  # no forward uses it
        tp.apply_plan(model, mesh, plan, check="never") if plan else None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            models.square_loss(model(torch.linspace(-1, step + 1, 16).view(2, 8)), torch.ones(2, 24)).backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(PLAN, 3)
    saved: Any = get_optimizer_state_dict(model, optimizer)
    moment = saved["state"]["fused.weight"]["exp_avg"]
    assert moment.shape == (24, 8)
    expected = moment.full_tensor()
    save({"optimizer": saved}, checkpoint_id=f"{folder}/moments")
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    kinds = {type(v).__name__ for s in torch.load(buffer)["state"].values() for v in s.values()}
    assert kinds <= {"Tensor", "DTensor"}
    resumed, other = trained(PLAN, 1)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(resumed, other)}
    load(state, checkpoint_id=f"{folder}/moments")
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    resumed.load_state_dict(model.state_dict())
    for one, network in ((optimizer, model), (other, resumed)):
        one.zero_grad()
        models.square_loss(network(torch.ones(2, 8)), torch.ones(2, 24)).backward()
        one.step()
    assert_equal(whole_state(resumed), whole_state(model))
    assert type(other.state[resumed.get_parameter("fused.weight")]["exp_avg"]) is torch.Tensor
    alone, single = trained({}, 1)
    state = {"optimizer": get_optimizer_state_dict(alone, single)}
    load(state, checkpoint_id=f"{folder}/moments")
    full = state["optimizer"]["state"]["fused.weight"]["exp_avg"]
    assert torch.equal(full, expected)
    offloaded: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert offloaded["state"]["fused.weight"]["exp_avg"].shape == (24, 8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_full_states_are_loaded_and_shards_in_their_place_refused(ranks: Ranks, broadcast: bool) -> None:
    """`full_state_dict=True` shards what it loads; of fused shards it gets one rank's, which no other rank takes."""
    mesh = ranks.mesh((2,), ("tp",))
    plan = {"both": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()}

    def trained(plan: Any, steps: int) -> tuple[Any, Any]:
        model: Any = models.seeded(models.Gated).double()
        tp.apply_plan(model, mesh, plan) if plan else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.linspace(-1, step + 1, 16, dtype=torch.float64).view(2, 8)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (alone, single) = trained(plan, 3), trained({}, 3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    full = moments["state"]["both.weight"]["exp_avg"].full_tensor()  # the way on
    torch.testing.assert_close(full, single.state[alone.both.weight]["exp_avg"], atol=1e-12, rtol=0)
    files = []
    for saved in (moments, optimizer.state_dict()):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        files.append(ranks.gather(buffer.getvalue()))
    of_rank_0 = torch.load(io.BytesIO(files[1][0]))
    if ranks.rank:
        with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*exp_avg.*full_state_dict=True"):
            trained(plan, 1)[1].load_state_dict(of_rank_0)
    else:
        trained(plan, 1)[1].load_state_dict(of_rank_0)
    optimizer.load_state_dict(torch.load(io.BytesIO(files[1][ranks.rank])))  # its own
    weights, moments = copy.deepcopy(get_state_dict(alone, single))  # torch loads counts of steps without a copy
    if broadcast and ranks.rank:
        weights, moments = {}, {}
    resumed, other = trained(plan, 1)
    set_model_state_dict(resumed, weights, options=options)
    set_optimizer_state_dict(resumed, other, moments, options=options)
    for each, one in ((resumed, other), (alone, single), (model, optimizer)):
        one.zero_grad()
        each(torch.ones(2, 8, dtype=torch.float64)).square().sum().backward()
        one.step()
    for each in (resumed, model):
        assert models.assert_close(whole_state(each), dict(alone.state_dict()), atol=1e-12) > 300
