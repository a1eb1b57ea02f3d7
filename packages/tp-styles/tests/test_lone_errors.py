"""An error of one rank in a checked call is raised by all ranks, wherever it comes from: no rank waits for another."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from tp_styles.check import checker

Tensor = torch.Tensor
WIDTH, HIDDEN = 8, 12
SECOND = 1  # the rank whose code is at fault


class Fault:
    """Code of one rank. `place` names the function that runs it, None for none; `shards` spares full tensors."""

    def __init__(self) -> None:
        self.place, self.rank = "", -1
        self.act: Callable[[Tensor], object] = lambda x: None
        self.shards = False

    def at(self, place: str, x: Tensor) -> Tensor:
        if place == self.place and dist.get_rank() == self.rank and not (self.shards and x.shape[-1] == HIDDEN):
            self.act(x)
        return x


class InBackward(torch.autograd.Function):
    """The tensor itself, and code of one rank in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.fault.at("backward", gradient), None


class Pair(nn.Module):
    """A column-wise and a row-wise layer."""

    def __init__(self, fault: Fault, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.fault, self.name = fault, name

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fault.at(self.name, torch.tanh(self.up(x)))
        hidden = InBackward.apply(hidden, self.fault) if self.name == "second" else hidden  # type: ignore[no-untyped-call]
        result: Tensor = self.down(hidden)
        return result


class Net(nn.Module):
    """Two pairs with a layer around them; the second one under a checkpoint. `catches` swallows errors of the first."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.first, self.second = Pair(fault, "first"), Pair(fault, "second")
        self.head, self.fault, self.catches = nn.Linear(WIDTH, WIDTH), fault, False

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x + self.first(x)
        except KeyError:
            if not self.catches:
                raise
        y: Any = checkpoint(self.second, x, use_reentrant=False)
        result: Tensor = self.head(self.fault.at("root", x + y))
        return result


PLAN = {"*.up": tp.ColwiseParallel(), "*.down": tp.RowwiseParallel()}


def raises(x: Tensor) -> None:
    raise KeyError("only here")


def refuses(x: Tensor) -> None:
    raise tp.PlanError([tp.Problem("shape-mismatch", "x", found="only here", hint="")])


def sums(x: Tensor) -> None:
    dist.all_reduce(torch.ones(3))


def gathers(x: Tensor) -> None:
    dist.all_gather([torch.ones(2) for _ in range(dist.get_world_size())], torch.ones(2))


# Name -> place, code, and whether it spares full tensors, so that the original runs.
FAULTS: dict[str, tuple[str, Callable[[Tensor], object], bool]] = {
    "in a region": ("first", raises, False),
    "in a later region": ("second", raises, False),
    "in the sharded region alone": ("first", raises, True),
    "behind the regions": ("root", raises, False),
    "in a backward": ("backward", raises, False),
    "in the sharded backward alone": ("backward", raises, True),
    "a refusal of one rank": ("second", refuses, True),
    "a sum that the others do not make": ("second", sums, True),
    "a gather that the others do not make": ("first", gathers, True),
}


@pytest.mark.ranks(2, 3, timeout=120)
def test_all_ranks_raise(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In models above the limit of float64, as on the two ranks here, no original of a region runs before it."""
    if ranks.world_size == 2:
        monkeypatch.setattr(checker, "FLOAT64_LIMIT", 1)
    mesh, x = (
        ranks.mesh((ranks.world_size,), ("tp",)),
        torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)),
    )
    for name, (place, act, shards) in FAULTS.items():
        fault = Fault()
        model: Any = models.seeded(lambda: Net(fault))  # noqa: B023
        tp.apply_plan(model, mesh, PLAN)
        fault.place, fault.rank, fault.act, fault.shards = place, SECOND, act, shards
        with pytest.raises(tp.PlanError) as error:
            model(x)
        texts = ranks.gather(str(error.value))
        assert len(set(texts)) == 1, (name, texts)
        assert f"on rank {SECOND}" in texts[0] or "check-raises" in texts[0], (name, texts[0])
        assert "only here" in texts[0] or "goes on to" in texts[0], (name, texts[0])
        fault.rank = -1  # nothing is left behind in any rank's messages
        alone: Any = models.seeded(lambda: Net(Fault()))
        model(x).square().sum().backward()
        alone(x).square().sum().backward()
        gradients = models.full_gradients(model, mesh)
        wanted: dict[str, Any] = {key: p.grad for key, p in alone.named_parameters()}
        assert models.assert_close(gradients, wanted, atol=1e-5) > 400, name


@pytest.mark.ranks(2, timeout=120)
def test_a_rank_that_catches_its_error_and_goes_on(ranks: Ranks) -> None:
    """It has left the others in a region that it does not finish."""
    mesh, x, fault = ranks.mesh((2,), ("tp",)), torch.ones(2, WIDTH), Fault()
    model: Any = models.seeded(lambda: Net(fault))
    model.catches = True
    tp.apply_plan(model, mesh, PLAN)
    fault.place, fault.rank, fault.act, fault.shards = "first", SECOND, raises, True
    with pytest.raises(tp.PlanError, match=r"check-raises.*(only here|goes on to)"):
        model(x)
    fault.rank = -1
    model(x).sum().backward()


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("place", "named"), [("first", r"first\.down ->"), ("backward", r"first\.up, second\.up\(input\)")]
)
def test_a_rank_that_waits_in_a_later_call_names_the_layer(ranks: Ranks, place: str, named: str) -> None:
    """A later call exchanges nothing of its own: the group's timeout ends it, here after two seconds."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 1]], timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("tp",))
    x, fault = torch.ones(2, WIDTH, requires_grad=True), Fault()
    model: Any = models.seeded(lambda: Net(fault))
    tp.apply_plan(model, mesh, PLAN)
    for _ in range(2):
        model(x).sum().backward()
    fault.place, fault.rank, fault.act = place, SECOND, raises
    text = rf"a parallel style at {named} over the mesh axis tp: all_reduce failed on rank 0: another rank died, or"
    expected = pytest.raises(KeyError) if ranks.rank == SECOND else pytest.raises(RuntimeError, match=text)
    with expected:
        model(x).sum().backward()
