"""Modules and parameters that come, go or are replaced after `shard_module`: right, or refused by name on every rank.

Without looking at them, gradients of what came later stayed each rank's own, and the ranks drifted apart silently.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_spec import shard_module
from shard_spec._shared.problems import PlanError
from shard_spec.sharding_plan import ShardingPlan
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import prune

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # other order of summation
RULES = {"up.weight": "tp:S(0)", "up.bias": "tp:S(0)", "down.weight": "tp:S(1)"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(self.inp(x))))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]  # Any from a module


def sharded() -> tuple[Net, Any]:
    net = Net()
    return net, shard_module(net, ShardingPlan(RULES, None, ["down"], mesh={"tp": 2}))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def linear(features: int, out: int) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(features, out).double()


class LoRA(nn.Module):
    """A linear with a low-rank addition, in its place."""

    def __init__(self, base: nn.Module, rank: int = 2, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, 6).double())
        self.b = nn.Parameter(torch.randn(6, rank).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()  # type: ignore[no-any-return]  # Any from a module


def append(net: Net) -> None:
    net.layers.append(linear(6, 6))


def replace_whole(net: Net) -> None:
    net.head = linear(6, 5)


def replace_sharded(net: Net) -> None:
    net.up = linear(6, 8)


def add_module(net: Net) -> None:
    net.layers.add_module("2", nn.Sequential(linear(6, 6), nn.LayerNorm(6).double()))


def inject(net: Net) -> None:
    net.layers[0] = LoRA(net.layers[0])


def inject_frozen(net: Net) -> None:
    net.requires_grad_(False)
    net.layers[1] = LoRA(net.layers[1])


def take_away(net: Net) -> None:
    del net.layers[1]


def take_all(net: Net) -> None:
    net.layers = nn.ModuleList()
    net.head = nn.Identity()  # type: ignore[assignment]  # another module stands there now


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.head, "weight", 0.5)


def parametrized(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.head)


def assigned(net: Net) -> None:
    net.head.load_state_dict(linear(6, 3).state_dict(), assign=True)


def new_parameter(net: Net) -> None:
    net.head.weight = nn.Parameter(linear(6, 3).weight.detach())


CHANGES: tuple[Callable[[Net], None], ...] = (
    append,
    replace_whole,
    replace_sharded,
    add_module,
    inject,
    inject_frozen,
    take_away,
    take_all,
    pruned,
    parametrized,
    assigned,
    new_parameter,
)


ALL = bool(os.environ.get("SHARD_SPEC_ALL"))
SAMPLE = (append, replace_sharded, inject_frozen, take_all, parametrized)


def steps(net: nn.Module, full: nn.Module, ranks: Ranks, count: int) -> int:
    """Train both; the number of parameters compared."""
    pairs = [[p for p in module.parameters() if p.requires_grad] for module in (net, full)]
    one, two = (torch.optim.SGD(pair, lr=0.05, momentum=0.9, foreach=False) for pair in pairs)
    compared = 0
    for step in range(count):
        batches = [
            torch.randn(3 - r, 4, generator=torch.Generator().manual_seed(9 * step + r)).double() for r in (0, 1)
        ]
        actual, expected = net(batches[ranks.rank]), full(torch.cat(batches))
        torch.testing.assert_close(actual, expected.split([3, 2])[ranks.rank].detach(), **CLOSE)
        for out, optimizer in ((actual, one), (expected, two)):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
        for (name, piece), value in zip(net.named_parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(whole(piece), value.detach(), **CLOSE, msg=name)
            compared += 1
    return compared


@pytest.mark.ranks(2)
def test_after_apply_torch_refuses_what_came_later(ranks: Ranks) -> None:
    net, mesh = Net(), ranks.mesh((2,), ("tp",))
    handle = ShardingPlan(RULES, mesh={"tp": 2}).apply(net, mesh)
    x = distribute_tensor(torch.randn(3, 4).double(), mesh)
    assert isinstance(net(x), DTensor)
    append(net)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        net(x)
    handle.undo()
    assert net(x.full_tensor()).shape == (3, 3)


@pytest.mark.ranks(2)
def test_what_came_later_trains_as_in_one_process(ranks: Ranks) -> None:
    for change in CHANGES if ALL else SAMPLE:
        net, handle = sharded()
        full = Net()
        assert steps(net, full, ranks, 1) == 12
        change(net), change(full)
        assert steps(net, full, ranks, 5) == 5 * len(list(full.parameters())), change.__name__
        copied = net if change is pruned else copy.deepcopy(net)  # torch copies no module that prune made
        handle.undo()
        for model in (net, copied):
            torch.testing.assert_close(
                [whole(p) for p in model.parameters()], [p.detach() for p in full.parameters()], **CLOSE
            )
        assert not any(isinstance(p, DTensor) for p in net.parameters())
        if copied is not net:
            assert steps(copied, full, ranks, 1) == len(list(full.parameters()))


class Branching(Net):
    """One of two replicated layers of one shape, by the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[int(x[0, 0] > 0)]
        return self.head(layer(self.down(torch.relu(self.up(self.inp(x))))))  # type: ignore[no-any-return]  # as above


@pytest.mark.ranks(4)
def test_gradients_of_different_branches_are_refused(ranks: Ranks) -> None:
    """The sums would add one layer's gradient on some ranks to another's on the rest, without an error."""
    net = Branching()
    shard_module(net, ShardingPlan(RULES, None, ["down"], mesh={"tp": 4}))
    x = torch.ones(3, 4).double()
    for sign in (1, -1):  # every rank takes the same branch
        net(sign * x).sum().backward()
    net(-x if ranks.rank == 2 else x).sum().backward()
    with pytest.raises(PlanError, match=r"ranks 0, 1, 3: gradients summed since the last forward: .*; rank 2: "):
        net(x)
    net(x).sum().backward()
    net(x)


@pytest.mark.ranks(2)
def test_a_table_that_came_later_is_refused_as_one_that_was_there(ranks: Ranks) -> None:
    net, _ = sharded()
    net.layers.add_module("table", nn.Embedding(4, 6, max_norm=1.0).double())
    with pytest.raises(PlanError, match=r"unsupported-option\] layers\.table\.weight"):
        net(torch.randn(2, 4).double())
