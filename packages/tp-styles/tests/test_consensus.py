"""A mistake on one rank alone: all ranks raise at once, and nobody waits.

torch's `parallelize_module` compares nothing: the other ranks wait in the broadcast of a weight until the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

PLAN: dict[str, tp.ParallelStyle] = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
SOON = 10.0
"""Seconds; the group's timeout is 30."""


class Raises(tp.ColwiseParallel):
    """A style of somebody's own that does not expect the module it gets."""

    def spec(self, info: Any, tp_size: int) -> Any:
        """Raise."""
        raise KeyError("out_features")


class NoRepr(TorchStyle):
    """A style as torch has them: its repr is its address, another one on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def mlp() -> Any:
    return models.seeded(models.MLP)


def on_meta() -> Any:
    with torch.device("meta"):
        return models.MLP()


def frozen() -> Any:
    model = mlp()
    model.up.weight.requires_grad_(False)
    return model


def parted(mesh: DeviceMesh) -> Any:
    """One that shares a weight with a model that was made parallel."""
    model, other = mlp(), nn.Linear(8, 12)
    other.weight = model.up.weight
    tp.apply_plan(other, mesh, tp.ColwiseParallel())
    return model


Call = Callable[[DeviceMesh], object]


def apply(make: Callable[[], Any] = mlp, plan: Any = PLAN, **options: Any) -> Call:
    return lambda mesh: tp.apply_plan(make(), mesh, plan, **options)


# What one rank does, what the other does, what the first is told, what the second is told
FAULTS: list[tuple[Call, Call, str, str]] = [
    (
        apply(plan={**PLAN, "no": PLAN["up"]}),
        apply(),
        r"nothing was changed on any rank\n.*unmatched-pattern",
        "on rank {}: no module",
    ),
    (apply(plan=[1]), apply(), "wrong-type", ".wrong-type. plan: on rank {}"),
    (apply(plan={"up": Raises()}), apply(), "out_features", "on rank {}: KeyError: 'out_features'"),
    (
        apply(src_data_rank=2),
        apply(),
        r"\[invalid-argument\].*0 to 1",
        r"\[invalid-argument\] src_data_rank: on rank {}",
    ),
    (
        apply(lambda: nn.MultiheadAttention(12, 3), tp.MultiheadAttentionParallel()),
        apply(lambda: nn.MultiheadAttention(12, 4), tp.MultiheadAttentionParallel()),
        "heads",
        r"\[does-not-divide\] on rank {}",
    ),
    (
        lambda mesh: tp.parallelize_module(mlp(), mesh, 3),  # type: ignore[arg-type]
        apply(),
        "Expect Union",
        ".wrong-type. plan: on rank {}",
    ),
]

# What one rank does and the other does not, and what both are told: nothing is wrong with either
DIFFERENT: list[tuple[Call, str]] = [
    (apply(plan={"up": PLAN["up"]}), "ranks-disagree"),
    (lambda mesh: tp.parallelize_module(mlp(), mesh, {}), "ranks-disagree"),
    (apply(lambda: mlp().double()), r"ranks-disagree.*up.weight: .12, 8. torch.float64 cpu"),
    (apply(on_meta), r"ranks-disagree.*up.weight: .12, 8. torch.float32 meta"),
    (apply(lambda: models.MLP(8, 14)), r"ranks-disagree.*up.weight: .14, 8."),
    (apply(frozen), "ranks-disagree.*12, 8.*frozen"),
    (apply(src_data_rank=1), "ranks-disagree.*src_data_rank=1"),
]


@pytest.mark.ranks(2)
def test_a_fault_of_one_rank(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    for number, (faulty, fine, own, peer) in enumerate([*FAULTS, *((call, apply(), t, t) for call, t in DIFFERENT)]):
        at = number % 2
        start = time.monotonic()
        with pytest.raises((tp.PlanError, KeyError), match=own if ranks.rank == at else peer.replace("{}", str(at))):
            (faulty if ranks.rank == at else fine)(mesh)
        assert time.monotonic() - start < SOON, number
    model = parted(mesh) if ranks.rank else mlp()
    if not ranks.rank:
        tp.apply_plan(nn.Linear(8, 12), mesh, tp.ColwiseParallel())  # the other rank does so in `parted`
    with pytest.raises(tp.PlanError, match=r"tied-weights. up\.weight: on rank 1"):
        tp.apply_plan(model, mesh, PLAN)
    assert all(type(p) is nn.Parameter for p in mlp().parameters())


@pytest.mark.ranks(2)
def test_no_more_is_communicated_where_nothing_is_wrong(ranks: Ranks) -> None:
    """One exchange of a digest, and the weights."""
    mesh = ranks.mesh((2,), ("tp",))
    with ranks.record() as log:
        handle = tp.apply_plan(mlp(), mesh, PLAN)
    assert (log.count(), log.count("all_gather"), log.count("broadcast")) == (5, 1, 4)
    with ranks.record() as log:
        handle.undo()
    assert (log.count(), log.count("all_gather")) == (4, 4), (
        "three shards; the bias of the row-wise layer is replicated"
    )
    model = nn.Sequential(nn.Linear(4, 4))  # a style whose repr is its address is the same on every rank
    tp.apply_plan(model, mesh, {"0": NoRepr()})


@pytest.mark.ranks(2)
def test_whole_tensors_again(ranks: Ranks) -> None:
    """`undo()` and `full_state_dict()` gather: a rank that cannot take part says so."""
    mesh = ranks.mesh((2,), ("tp",))
    model = mlp()
    with pytest.raises(tp.PlanError, match="ranks-disagree"):
        tp.parallelize_module(model, mesh, PLAN if ranks.rank else None)
    fused: Any = models.seeded(models.Gated)
    expected = fused.both.weight.detach().clone()
    handle = tp.apply_plan(fused, mesh, {"both": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()})
    part = fused.both.weight
    if ranks.rank:
        fused.both.weight = nn.Parameter(part.detach().clone())
    for call in (lambda: tp.full_state_dict(fused), handle.undo):
        lost = "local-shard-as-full"
        if call == handle.undo:
            lost = "ranks-disagree. undo: rank 0: both.weight: ShardParameter.*rank 1: both.weight: Parameter"
        with pytest.raises(tp.PlanError, match=lost):
            call()
    fused.both.weight = part
    assert torch.equal(tp.full_state_dict(fused)["both.weight"], expected)
    if ranks.rank:
        changes, handle._changes = handle._changes, []
    with pytest.raises(tp.PlanError, match=r"\[already-applied\] on rank 1"):
        handle.undo()
    if ranks.rank:
        handle._changes = changes
    assert torch.equal(handle.undo().get_parameter("both.weight"), expected)
