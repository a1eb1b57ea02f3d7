"""Checkpoints with optimizer state, written on one mesh, load on any other bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import optimizer_state_to_dtensor, optimizer_state_to_local, pre_dp_module_transform, wrap_ddp


def small_gpt() -> models.GPT:
    return models.GPT(depth=1)


def built(ranks: Ranks, shape: tuple[int, int], seed: int) -> tuple[Any, Any, Any]:
    mesh = ranks.mesh(shape, ("dp", "tp"))
    model = models.parallelize_gpt(models.seeded(small_gpt, seed), mesh["tp"])
    ddp = wrap_ddp(model, mesh=mesh)
    return mesh, ddp, two_groups(ddp)


def two_groups(model: Any) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay."""
    groups: Any = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    return torch.optim.AdamW(groups, 1e-3)


def exact(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a nested state, whole, by path."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{name}": tensor for name, tensor in exact(value).items()}
        elif isinstance(value, torch.Tensor):
            flat[key] = models.whole(value)
    return flat


def quietly(act: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch's checkpointing says about its own future
        return act(*args, **kwargs)


@pytest.mark.ranks(4)
def test_written_at_2x2_and_read_on_every_mesh(ranks: Ranks, tmp_path: Path) -> None:
    # The seed: DCP saved a (16, 16) shard as the whole (32, 16) weight.
    folder = ranks.gather(str(tmp_path))[0]
    mesh, ddp, optimizer = built(ranks, (2, 2), 0)
    models.train(ddp, optimizer, models.tokens(), index=mesh["dp"].get_local_rank(), count=2, steps=3)
    with ranks.record(allow_empty=True) as log:
        saved = {"model": ddp.module.state_dict(), "optim": optimizer_state_to_dtensor(ddp, optimizer)}
    assert not log.events
    assert saved["optim"]["param_groups"][0]["params"][0] == "embedding.weight"
    assert isinstance(saved["optim"]["state"]["blocks.0.up.weight"]["exp_avg"], DTensor)
    quietly(save, saved, checkpoint_id=folder)
    expected = {name: value.clone() for name, value in exact(saved).items()}
    names = len(list(ddp.parameters()))
    assert len(expected) == 4 * names  # weight, exp_avg, exp_avg_sq, step
    compared = 0
    for shape in ((1, 4), (4, 1)):
        _, other, fresh = built(ranks, shape, 1)
        before = {name: value.clone() for name, value in exact(other.module.state_dict()).items()}
        loaded = {"model": other.module.state_dict(), "optim": optimizer_state_to_dtensor(other, fresh, template=True)}
        assert not fresh.state and all(p.grad is None for p in other.parameters())
        after = exact(other.module.state_dict())
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert fresh.param_groups[0]["lr"] == 1e-3
        quietly(load, loaded, checkpoint_id=folder)
        other.module.load_state_dict(loaded["model"])
        optimizer_state_to_local(other, fresh, loaded["optim"])
        assert not any(isinstance(v, DTensor) for state in fresh.state.values() for v in state.values())
        loaded_state = exact({"model": other.module.state_dict(), "optim": optimizer_state_to_dtensor(other, fresh)})
        for name, value in expected.items():
            assert torch.equal(loaded_state[name], value), (shape, name)
            compared += 1
        assert fresh.param_groups[0]["weight_decay"] == 0.1
    assert compared == 2 * len(expected)

    # one process without tensor parallelism, as if on one device
    single = models.seeded(small_gpt, 2)
    alone = two_groups(single)
    loaded = {"model": single.state_dict(), "optim": optimizer_state_to_dtensor(single, alone, template=True)}
    quietly(load, loaded, checkpoint_id=folder, no_dist=True)
    single.load_state_dict(loaded["model"])
    optimizer_state_to_local(single, alone, loaded["optim"])
    loaded_state = exact({"model": single.state_dict(), "optim": optimizer_state_to_dtensor(single, alone)})
    assert sum(torch.equal(loaded_state[name], value) for name, value in expected.items()) == len(expected)

    # training goes on where it was
    task = models.tokens()
    task.batches = task.batches[3:]
    models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2, steps=2)
    models.train(single, alone, task, steps=2)
    models.assert_same_state(ddp.module.state_dict(), single.state_dict(), count=names, atol=5e-6)

    # and back: what one device wrote, read at 2x2
    plain = {"model": single.state_dict(), "optim": optimizer_state_to_dtensor(single, alone)}
    assert not any(isinstance(value, DTensor) for value in plain["model"].values())
    if ranks.rank == 0:
        quietly(save, plain, checkpoint_id=f"{folder}/plain", no_dist=True)
    ranks.gather(None)  # it is written
    loaded = {"model": ddp.module.state_dict(), "optim": optimizer_state_to_dtensor(ddp, optimizer)}
    quietly(load, loaded, checkpoint_id=f"{folder}/plain")
    ddp.module.load_state_dict(loaded["model"])
    optimizer_state_to_local(ddp, optimizer, loaded["optim"])
    loaded_state = exact({"model": ddp.module.state_dict(), "optim": optimizer_state_to_dtensor(ddp, optimizer)})
    expected = exact(plain)
    assert sum(torch.equal(loaded_state[name], value) for name, value in expected.items()) == len(expected) == 4 * names


@pytest.mark.ranks(2)
def test_optimizer_state_of_one_device_and_of_other_kinds(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    reference = models.seeded(models.MLP)
    theirs = torch.optim.Adam(reference.parameters(), 1e-2)
    models.train(reference, theirs, models.vectors(), steps=2)
    plain = optimizer_state_to_dtensor(reference, theirs)
    assert not any(isinstance(v, DTensor) for s in plain["state"].values() for v in s.values())

    compared = 0
    for bridged in (False, True):
        model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
        if bridged:
            pre_dp_module_transform(model)
        model.load_state_dict(reference.state_dict() if bridged else {**model.state_dict()})
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        optimizer_state_to_local(model, optimizer, plain)
        back = optimizer_state_to_dtensor(model, optimizer)
        for name, state in plain["state"].items():
            for key, value in state.items():
                assert torch.equal(models.whole(back["state"][name][key]), value)
                compared += 1
        local = optimizer.state[dict(model.named_parameters())["up.weight"]]["exp_avg"]
        assert isinstance(local, DTensor) is not bridged
    assert compared == 2 * 6 * 3
    models.train(reference, theirs, models.vectors(), steps=1)
    models.train(model, optimizer, models.vectors(), steps=1)
    models.assert_same_state(model.state_dict(), reference.state_dict(), count=6, atol=1e-6)
    # the template of an optimizer without state, and of one that has been used
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert optimizer_state_to_dtensor(model, sgd, template=True)["state"] == {}
    assert optimizer_state_to_dtensor(model, sgd)["param_groups"][0]["lr"] == 0.1


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_named_and_changes_nothing(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    models.train(model, optimizer, models.vectors(), steps=1)
    good = optimizer_state_to_dtensor(model, optimizer)
    values = {name: value.clone() for name, value in exact(good).items()}
    bad = {"state": {name: dict(state) for name, state in good["state"].items()}, "param_groups": good["param_groups"]}
    bad["state"]["up.weight"]["exp_avg"] = torch.zeros(16, 16)  # one rank's part
    bad["state"]["no.such"] = {"exp_avg": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"model-mismatch.*no\.such") as caught:
        optimizer_state_to_local(model, optimizer, bad)
    codes = sorted(problem.code for problem in caught.value.problems)  # type: ignore[attr-defined]
    assert codes == ["model-mismatch", "shape-mismatch"]
    with pytest.raises(ValueError, match="model-mismatch"):
        optimizer_state_to_local(model, optimizer, {"state": {}, "param_groups": []})
    fewer = torch.optim.Adam(model.head.parameters(), 1e-2)
    with pytest.raises(ValueError, match=r"model-mismatch.*6 parameters saved, 2 here"):
        optimizer_state_to_local(model, fewer, {"state": {}, "param_groups": good["param_groups"]})
    with pytest.raises(ValueError, match="parameter-not-in-module"):
        optimizer_state_to_dtensor(model.head, optimizer)
    after = exact(optimizer_state_to_dtensor(model, optimizer))
    assert all(torch.equal(after[name], value) for name, value in values.items())


@pytest.mark.ranks(4)
def test_torchs_own_checkpoint_functions(ranks: Ranks) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    _, ddp, _ = built(ranks, (2, 2), 0)
    state = quietly(get_model_state_dict, ddp)
    assert list(state) == list(small_gpt().state_dict())
    assert isinstance(state["blocks.0.up.weight"], DTensor)
    full = quietly(get_model_state_dict, ddp, options=StateDictOptions(full_state_dict=True))
    models.assert_same_state(full, models.seeded(small_gpt).state_dict(), count=len(state), atol=0)
    expected = models.seeded(small_gpt, 5).state_dict()
    quietly(set_model_state_dict, ddp, dict(expected), options=StateDictOptions(full_state_dict=True))
    models.assert_same_state(ddp.module.state_dict(), expected, count=len(state), atol=0)


class Branches(nn.Module):
    """One branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = models.MLP(), models.MLP()

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd"])
def test_parameters_that_were_never_used(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    # A first step writes state that zeros are not: NAdam's product of momenta, SGD's first buffer under dampening.
    make: Any = {
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
        "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    }[kind]
    folder = ranks.gather(str(tmp_path))[0]

    def built(shape: tuple[int, int], seed: int) -> tuple[Any, Any, Any]:
        mesh = ranks.mesh(shape, ("dp", "tp"))
        model = models.seeded(Branches, seed)
        for branch in model.children():
            models.parallelize_mlp(branch, mesh["tp"])
        ddp = wrap_ddp(model, mesh=mesh, find_unused_parameters=True)
        return mesh, ddp, make(ddp.parameters())

    mesh, ddp, optimizer = built((2, 2), 0)
    models.train(ddp, optimizer, models.vectors(), index=mesh["dp"].get_local_rank(), count=2, steps=3)
    with_state = [name for name, p in ddp.module.named_parameters() if p in optimizer.state]
    assert len(with_state) == 6
    saved = optimizer_state_to_dtensor(ddp, optimizer)
    assert [name for name, p in ddp.module.named_parameters() if p in optimizer.state] == with_state  # nothing was made
    assert len(saved["state"]) == 12 and sum(saved["param_groups"][0]["has_state"]) == 6
    quietly(save, {"model": ddp.module.state_dict(), "optim": saved}, checkpoint_id=folder)
    for shape in ((1, 4), (4, 1), (2, 2)):
        _, other, fresh = built(shape, 1)
        loaded = {"model": other.module.state_dict(), "optim": optimizer_state_to_dtensor(other, fresh, template=True)}
        quietly(load, loaded, checkpoint_id=folder)
        other.module.load_state_dict(loaded["model"])
        optimizer_state_to_local(other, fresh, loaded["optim"])
        assert [name for name, p in other.module.named_parameters() if p in fresh.state] == with_state
        assert "has_state" not in fresh.param_groups[0]
    # On the same mesh training goes on bit for bit, the unused branch included, which is used from now on.
    for run, opt in ((ddp, optimizer), (other, fresh)):
        run.module.forward = lambda x, m=run.module: m.used(x) + m.never(x)
        models.train(run, opt, models.vectors(), index=mesh["dp"].get_local_rank(), count=2, steps=3)
    expected = {name: models.whole(value) for name, value in ddp.module.state_dict().items()}
    models.assert_same_state(other.module.state_dict(), expected, count=12, atol=0)
