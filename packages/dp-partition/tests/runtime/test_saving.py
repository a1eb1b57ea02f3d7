"""Files of placed models: full tensors that a plain process loads, or an error that names the way on."""

from __future__ import annotations

import copy
import io
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

BOTH = pytest.mark.parametrize("door", [dp.distribute, dp.compile])


def train(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def made() -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 7 rows on two ranks are uneven
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def called(step: Any, model: Any, optim: Any, calls: int = 5) -> None:
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        step(model, optim, *(torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (8, 3)))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    assert b"dp_partition" not in data and b"DTensor" not in data, "a plain process cannot load it"
    return torch.load(io.BytesIO(data), weights_only=True)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and len(got) == 4
    for name, value in got.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
@BOTH
def test_a_state_dict_in_shards_is_saved_full_or_refused(ranks: Ranks, door: Any) -> None:
    (model, optim), (alone, own) = made(), made()
    step = door(train, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    called(step, model, optim)
    called(train, alone, own)
    weights, states = model.state_dict(), optim.state_dict()
    assert all(isinstance(value, DTensor) for value in weights.values())
    for value in (weights, {"last": weights["2.weight"]}, states):
        with pytest.raises(dp.PlanError, match=r"already-applied.*lacks the rows.*step\.unsharded.*get_state_dict"):
            saved(value)
    with pytest.raises(dp.PlanError, match=r"a copy of Sequential.*step\.unsharded"):
        saved(model)
    assert b"dp_partition" not in saved(states["param_groups"])
    best = copy.deepcopy(weights)  # on the ranks, to be loaded again
    with step.unsharded():
        assert_equal(loaded(saved(model.state_dict())), alone.state_dict())
        data = saved(model)
        assert b"dp_partition" not in data
        again = torch.load(io.BytesIO(data), weights_only=False)
    weight = next(again.parameters())
    assert type(again) is nn.Sequential and torch.equal(weight, loaded(saved(again.state_dict()))["0.weight"])
    called(step, model, optim, 1)
    model.load_state_dict(best)
    with step.unsharded():
        assert_equal(loaded(saved(model.state_dict())), alone.state_dict())
    called(step, model, optim, 1)
    step.release()
    assert b"dp_partition" not in saved([model, optim.state_dict()])


@pytest.mark.ranks(2)
@BOTH
def test_parameters_and_what_is_computed_of_them_are_refused(ranks: Ranks, door: Any) -> None:
    """``keep_vars=True`` gives parameters, and a half-precision copy of a state dict has tensors without our marks."""
    (model, optim), mesh = made(), ranks.mesh((2,), ("dp",))
    step = door(train, mesh=mesh, style="fully_shard")
    called(step, model, optim)
    weights = model.state_dict()
    derived: dict[str, Any] = {
        "keep_vars": model.state_dict(keep_vars=True),
        "parameters": dict(model.named_parameters()),
        "half": {name: value.half() for name, value in weights.items()},
        "average": {name: (value + value) / 2 for name, value in weights.items()},
        "a row": weights["0.weight"][0],
        "one copy": copy.deepcopy(weights["0.weight"]).clone(),
        "moments": [state["exp_avg"].float() for state in optim.state_dict()["state"].values()],
    }
    for value in derived.values():
        with pytest.raises(dp.PlanError, match=r"already-applied.*a pickle of.*rows.*step\.unsharded.*get_state_dict"):
            saved(value)
    assert len(derived) == 7 and getattr(model[0].weight, "device_mesh", None) == mesh
    own = distribute_tensor(torch.ones(4), mesh, [Shard(0)])  # the caller's own, on the same ranks
    assert b"DTensor" in saved(own)
    model.load_state_dict({name: (value + value) / 2 for name, value in weights.items()})
    called(step, model, optim, 1)


@pytest.mark.ranks(2)
def test_a_replicated_state_dict_is_saved_as_plain_tensors(ranks: Ranks) -> None:
    (model, optim), (alone, own) = made(), made()
    step = dp.compile(train, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    called(step, model, optim)
    called(train, alone, own)
    data = saved({"model": model.state_dict(), "optim": optim.state_dict(), "copy": copy.deepcopy(model.state_dict())})
    file = loaded(data)
    assert_equal(file["model"], alone.state_dict())
    assert_equal(file["copy"], alone.state_dict())
    for number, state in own.state_dict()["state"].items():
        torch.testing.assert_close(file["optim"]["state"][number], state, rtol=1e-12, atol=1e-14)
    alone.load_state_dict(file["model"])
    own.load_state_dict(file["optim"])


def saves(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor, files: list[bytes], ranks: Any) -> None:
    train(model, optim, x, y)
    if ranks is None or torch.distributed.get_rank() in ranks:
        files.append(saved({"model": model.state_dict(), "optim": optim.state_dict()}))


UNCHECKED = pytest.mark.filterwarnings("ignore:saves. no call is compared")  # it would save twice


@pytest.mark.ranks(2)
@UNCHECKED
def test_a_step_that_saves_writes_what_one_process_writes(ranks: Ranks) -> None:
    (model, optim), (alone, own), files, want = made(), made(), list[bytes](), list[bytes]()
    step = dp.distribute(saves, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard", full="refuse")
    for call in range(5):
        x, y = torch.full((4, 8), 0.1 * call).double(), torch.ones(4, 3).double()
        step(model, optim, x, y, files, None)
        saves(alone, own, x, y, want, None)
    assert len(files) == 5 and all(isinstance(p, DTensor) for p in model.parameters())
    for got, expected in zip(files, want, strict=True):
        mine, theirs = loaded(got), loaded(expected)
        assert_equal(mine["model"], theirs["model"])
        torch.testing.assert_close(mine["optim"]["state"], theirs["optim"]["state"], rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2, timeout=60)
@UNCHECKED
def test_a_rank_that_saves_alone_in_the_step_makes_all_raise(ranks: Ranks) -> None:
    (model, optim), files = made(), list[bytes]()
    step = dp.distribute(saves, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x, y = torch.ones(4, 8).double(), torch.ones(4, 3).double()
    for _ in range(3):
        step(model, optim, x, y, files, None)
    with pytest.raises(dp.PlanError, match=r"ranks-diverge.*pickle a shard.*unsharded"):
        step(model, optim, x, y, files, (0,))
    assert len(files) == 3
    step(model, optim, x, y, files, None)  # the ranks are together again
    assert len(files) == 4


@pytest.mark.ranks(2)
def test_a_graph_of_a_step_that_saves_is_refused_by_its_line(ranks: Ranks) -> None:
    model, optim = made()
    step = dp.compile(saves, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    with pytest.raises(dp.PlanError, match=r"not-traceable.*torch\.save.*torch\.save\(value, file\).*unsharded"):
        step(model, optim, torch.ones(4, 8).double(), torch.ones(4, 3).double(), [], None)
