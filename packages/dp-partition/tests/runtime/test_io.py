"""What users change between calls: the next step sees it, as it would in a plain loop, or is refused by name.

Each of these was once ignored without a word: optimizer state loaded from a plain checkpoint was read as a shard, a
learning rate in a tensor stayed what it was, a replaced buffer, an entry of a config, a hook, a function or a module
without parameters was that of the first trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from dp_partition.capture.inputs import read_arguments, read_optimizers
from dp_partition.capture.state import find_step_state
from dp_partition.plan.placements import fake_mesh
from dp_partition.plan.plan import Style
from dp_partition.runner import program_key
from ranktest import Ranks
from torch import nn

FACTORS = {"of": [1.0]}
SETTINGS = SimpleNamespace(shift=0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)
        self.config, self.powers, self.squash = {"scale": 1.0}, [1.0, 2.0], torch.tanh
        self.masks, self.out, self.seen = [torch.ones(8)], nn.Identity(), [0.0]
        self.register_buffer("offset", torch.zeros(8))
        self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.squash(self.up(x)) * self.config["scale"]
        shifted = self.out(self.down(hidden)) * self.powers[0] + self.get_buffer("offset")
        return torch.as_tensor(shifted * self.masks[0])


def distance_from(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor((out * FACTORS["of"][0] + SETTINGS.shift - y).square().mean())


class Trainer:
    """Keeps a list beside what its step reads."""

    def __init__(self) -> None:
        self.factor, self.losses = 1.0, [0.0]

    def train_step(self, model: Any, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        loss: Any = (model(x) * self.factor).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss


def train_step(model: Any, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss: Any = distance_from(model(x), y)
    loss.backward()
    optim.step()
    model.zero_grad()
    return loss


Change = Callable[[Any, torch.optim.Optimizer], None]


def thaw(model: Any, optim: torch.optim.Optimizer) -> None:
    model.up.weight.requires_grad_(True)


def add_group(model: Any, optim: torch.optim.Optimizer) -> None:
    optim.add_param_group({"params": [model.down.bias], "lr": 0.05})


def tensor_lr(model: Any, optim: torch.optim.Optimizer) -> None:
    optim.param_groups[0]["lr"] = torch.tensor(0.03)


def fill_lr(model: Any, optim: torch.optim.Optimizer) -> None:
    optim.param_groups[0]["lr"].fill_(0.005)


def other_buffer(model: Any, optim: torch.optim.Optimizer) -> None:
    model.offset = torch.full((8,), 0.5)


def config(model: Any, optim: torch.optim.Optimizer) -> None:
    model.config["scale"], model.powers[0] = 0.7, 1.3


def other_function(model: Any, optim: torch.optim.Optimizer) -> None:
    model.squash = torch.sigmoid


def other_module(model: Any, optim: torch.optim.Optimizer) -> None:
    model.out = nn.ELU()


def hook(model: Any, optim: torch.optim.Optimizer) -> None:
    model.down.register_forward_hook(lambda module, args, out: out * 1.5)


def other_mask(model: Any, optim: torch.optim.Optimizer) -> None:
    model.masks[0] = torch.linspace(0.5, 1, 8)


def write_mask(model: Any, optim: torch.optim.Optimizer) -> None:
    model.masks[0].mul_(0.9)


def forget(model: Any, optim: torch.optim.Optimizer) -> None:
    optim.state.clear()


CHANGES: dict[str, tuple[Change, ...]] = {  # one after the other
    "zero1": (thaw, add_group, tensor_lr, fill_lr, other_function, other_mask, write_mask),
    "fully_shard": (thaw, other_buffer, config, forget, other_module, hook),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", CHANGES)
def test_the_next_step_sees_it(ranks: Ranks, style: Style, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = (models.seeded(Net).to(ranks.device) for _ in range(2))
    first = [list(net.parameters())[:3] for net in (model, plain)]  # the last bias comes later
    own, theirs = (torch.optim.AdamW(params, lr=1e-2, fused=True) for params in first)
    step = dp.compile(train_step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    generator = torch.Generator().manual_seed(ranks.rank)

    def compare(label: str) -> None:
        parallel: Any = nn.parallel.DistributedDataParallel(plain)
        for _ in range(2):
            x, y = (torch.randn(4, 8, generator=generator).to(ranks.device) for _ in range(2))
            expected = train_step(parallel, theirs, x, y).detach()
            with models.case(label):  # a shard's last elements are rounded otherwise than in the middle of a whole
                torch.testing.assert_close(step(model, own, x, y), expected, rtol=1e-5, atol=0)

    compare("at first")
    for change in CHANGES[style]:
        for net, optim in ((model, own), (plain, theirs)):
            change(net, optim)
        compare(change.__name__)
    monkeypatch.setitem(FACTORS, "of", [1.5])
    compare("a list in a global")
    monkeypatch.setattr(SETTINGS, "shift", 0.25)
    compare("a settings object")
    saved = copy.deepcopy(theirs.state_dict())
    compare("one more step")
    for optim in (own, theirs):  # of a plain loop: whole tensors
        optim.load_state_dict(copy.deepcopy(saved))
    compare("loaded state")
    with step.unsharded(), torch.no_grad():
        for net in (model, plain):
            net.get_parameter("up.weight")[2:4].mul_(0.5)
    compare("written unsharded")
    weights = {name: tensor + 0.1 for name, tensor in plain.state_dict().items()}
    plain.load_state_dict(weights)
    with step.unsharded():  # once the parameters that this puts in place were let go with their values
        model.load_state_dict(weights, assign=style == "zero1")
    compare("loaded unsharded")
    with step.unsharded():
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_what_a_graph_cannot_take_over_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(Net).to(ranks.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = dp.compile(train_step, mesh=mesh, style="fully_shard")
    x = torch.ones(4, 8, device=ranks.device)
    bias = model.get_parameter("up.bias")
    bias.grad = torch.ones_like(bias)
    with pytest.raises(dp.PlanError, match=r"python-state.*up\.bias"):
        step(model, optim, x, x)
    optim.zero_grad()
    step(model, optim, x, x)
    before = model.get_parameter("down.weight").full_tensor()  # type: ignore[attr-defined]  # a DTensor
    for values in (model.get_parameter("down.weight").data * 0.5, torch.zeros(8, 7, device=ranks.device)):
        model.get_parameter("down.weight").data = values  # which torch ignores as well
        with pytest.raises(dp.PlanError, match=r"parameter-replaced.*down\.weight.*\.data ="):
            step(model, optim, x, x)
        assert torch.equal(model.get_parameter("down.weight").full_tensor(), before)  # type: ignore[attr-defined]
    alone = nn.Parameter(torch.ones(3))
    optim.add_param_group({"params": [alone]})  # no gradient reaches it: as on one device it stays as it is
    step(model, optim, x, x)
    assert torch.equal(optim.param_groups[1]["params"][0].full_tensor(), torch.ones(3)) and step.num_traces == 3
    del optim.param_groups[1]
    weight = model.get_parameter("down.weight")
    state, moved = optim.state[weight], torch.distributed.tensor.distribute_tensor(torch.ones(8, 7), mesh)
    moment, state["exp_avg"] = state["exp_avg"], moved
    with pytest.raises(dp.PlanError, match="state-device"):
        step(model, optim, x, x)
    state["exp_avg"] = torch.zeros(4, 4, device=ranks.device)  # a fused kernel would walk past its end
    with pytest.raises(dp.PlanError, match=r"shape-mismatch.*down\.weight exp_avg"):
        step(model, optim, x, x)
    state["exp_avg"] = moment
    model.register_buffer("another", torch.ones(1))
    before = model.get_parameter("down.weight").full_tensor()  # type: ignore[attr-defined]  # a DTensor
    traces = step.num_traces
    step(model, optim, x, x)
    after = model.get_parameter("down.weight").full_tensor()  # type: ignore[attr-defined]
    assert 0 < (after - before).abs().max() < 0.1 and step.num_traces == traces + 1, "placed anew, with its values"


def test_what_no_code_of_a_step_names_may_change() -> None:
    """A list of losses that grows would trace each call anew."""
    model, trainer = models.seeded(Net), Trainer()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(trainer.train_step, mesh=fake_mesh(1, 0, "cpu"), style="replicate")
    runner, x = runner_of(step), torch.ones(4, 8)

    def key() -> Any:
        call = read_arguments("step", (model, optim, x), {})
        step_state = find_step_state(trainer.train_step, call.args, {})
        return program_key(step_state, call, runner.traces.reads, read_optimizers([optim]))

    first = key()
    for _ in range(3):
        trainer.losses.append(1.0)
        model.seen.append(1.0)  # type: ignore[operator, union-attr]
        assert key() == first
    trainer.factor = 2.0
    assert key() != first
    trainer.factor = 1.0
    model.powers[0] = 3.0  # type: ignore[operator]
    assert key() != first
