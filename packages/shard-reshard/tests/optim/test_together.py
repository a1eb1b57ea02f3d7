"""A step happens on all ranks or on none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, WholeMatrices
from torch import nn
from torch.distributed.tensor import Shard
from whole_models import SIZES, Twin, local, mesh_of, of_mesh


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _values(twin: Twin) -> list[torch.Tensor]:
    return [local(p.detach()).clone() for p in twin.named.values()]


class _Fails(torch.optim.SGD):
    """Raises in its third step on the owner of the smallest matrix."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        small = any(p.shape == (3, 3) and p.grad is not None for group in self.param_groups for p in group["params"])
        self.steps += 1
        if small and self.steps == 3:
            raise ValueError("no convergence")
        return super().step(closure)


@pytest.mark.ranks(2, 3)
def test_an_optimizer_that_raises_on_its_owner(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((ranks.world_size,)), [Shard(0)], SIZES)
    optimizer = WholeMatrices(twin.named, lambda ps: _Fails(ps, lr=0.1), bucket_bytes=100, per_matrix=True)
    one = torch.optim.SGD(list(twin.reference.values()), lr=0.1)
    saved: dict[str, Any] = {}
    for step in range(3):
        twin.backward(step)
        if step == 2:
            saved, before = optimizer.state_dict(), _values(twin)
            with pytest.raises(PlanError, match=r"rank-failed.*ValueError: no convergence") as raised:
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, _values(twin), strict=True))
            is_owner = optimizer.plan.owner["g"] == ranks.rank
            assert isinstance(raised.value.__cause__, ValueError) is is_owner
            with pytest.raises(PlanError, match=r"partly-updated.*load_state_dict"):
                optimizer.step()
            with pytest.raises(PlanError, match="partly-updated"):
                optimizer.state_dict()
            optimizer.load_state_dict(saved)  # as it was before the failed step
        optimizer.step()
        one.step()
        assert twin.compared() > 0


@pytest.mark.ranks(3)
def test_gradients_and_hyperparameters_are_the_same_on_all_ranks(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((3,)), [Shard(0)], {"w": (9, 8), "v": (6, 4)})
    optimizer, one = WholeMatrices(twin.named, _muon), _muon(list(twin.reference.values()))
    for step in range(5):
        twin.backward(step)
        before = _values(twin)
        gradient = twin.named["w"].grad
        if ranks.rank == 1:
            twin.named["w"].grad = None
        with pytest.raises(PlanError, match=r"ranks-disagree\] w: rank 0 has a gradient, rank 1 has none"):
            optimizer.step()
        twin.named["w"].grad = gradient
        if ranks.rank == 2:
            optimizer.param_groups[0]["lr"] *= 2
        with pytest.raises(PlanError, match=r"ranks-disagree.*'lr'.*on rank 2"):
            optimizer.step()
        if ranks.rank == 2:
            optimizer.param_groups[0]["lr"] /= 2
        assert all(torch.equal(a, b) for a, b in zip(before, _values(twin), strict=True))
        optimizer.step()
        one.step()
        assert twin.compared() > 0


@pytest.mark.ranks(2)
def test_a_gradient_that_cannot_be_moved(ranks: Ranks) -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    optimizer = WholeMatrices(embedding.named_parameters(), lambda ps: torch.optim.SGD(ps, lr=0.1))
    if ranks.rank == 1:
        embedding(torch.tensor([1, 2])).sum().backward()
    else:
        embedding.weight.grad = torch.ones(4, 3)
    with pytest.raises(PlanError, match=r"on rank 1: .*sparse=False"):
        optimizer.step()
    # A full parameter whose gradient nobody has averaged over ranks is no replica.
    embedding.weight.grad = torch.full((4, 3), 1.0 + ranks.rank)
    with pytest.raises(PlanError, match=r"differs between ranks.*DistributedDataParallel"):
        optimizer.step()
    assert torch.equal(embedding.weight, torch.ones(4, 3))


@pytest.mark.ranks(2)
def test_grad_scaler(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((2,)), [Shard(0)], {"w": (9, 8), "v": (6, 4)})
    optimizer, one = WholeMatrices(twin.named, _muon), _muon(list(twin.reference.values()))
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))
    ours.scale(torch.zeros(())), theirs.scale(torch.zeros(()))
    skipped = 0
    for step in range(6):
        twin.backward(step)
        for parameter in (*twin.named.values(), *twin.reference.values()):
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 4.0
        before = _values(twin)
        if step % 2:
            ours.unscale_(optimizer)
            theirs.unscale_(one)
        elif step == 2:  # an infinity on one rank's shard
            if ranks.rank == 1:
                twin.named["w"].grad.to_local()[0, 0] = float("inf")
            twin.reference["w"].grad[5, 0] = float("inf")  # type: ignore[index]
        ours.step(optimizer)
        theirs.step(one)
        ours.update(4.0)
        theirs.update(4.0)
        skipped += all(torch.equal(a, b) for a, b in zip(before, _values(twin), strict=True))
        assert twin.compared() > 0
    assert skipped == 1


class _Coupled(torch.optim.SGD):
    """Scales all gradients by their common norm, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class _Counts(torch.optim.SGD):
    """Writes to its groups: a step count, and on request a number that depends on its parameters."""

    def __init__(self, params: Any, couple: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.couple = couple

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if self.couple:
                group["d"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


@pytest.mark.ranks(2, 3)
def test_state_that_is_not_of_a_parameter(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((ranks.world_size,)), [Shard(0)], {"w": (9, 8), "v": (6, 4)})
    with pytest.raises(PlanError, match=r"not-per-matrix\] make: LBFGS"):
        WholeMatrices(twin.named, torch.optim.LBFGS)
    mixed = of_mesh(mesh_of((ranks.world_size,)), [Shard(0)], {"half": (4, 4)}, torch.bfloat16).named | twin.named
    with pytest.raises(PlanError, match=r"not-per-matrix\] make: Adafactor.*bfloat16.*eps=\(1e-7"):
        WholeMatrices(mixed, torch.optim.Adafactor)
    WholeMatrices(mixed, lambda ps: torch.optim.Adafactor(ps, eps=(1e-7, 1e-3)))
    with pytest.raises(PlanError, match=r"not-per-matrix\] make: _Coupled.*depends on the other tensors"):
        WholeMatrices(twin.named, lambda ps: _Coupled(ps, lr=0.1))
    coupled = WholeMatrices(twin.named, lambda ps: _Counts(ps, couple=True), per_matrix=True)
    twin.backward(0)
    before = _values(twin)
    with pytest.raises(PlanError, match=r"not-per-matrix\] param_groups\[0\]\['d'\].*on another"):
        coupled.step()
    assert all(torch.equal(a, b) for a, b in zip(before, _values(twin), strict=True))
    # A count that all owners agree on is that of the group on every rank, also on one that owns nothing.
    optimizer, one = WholeMatrices(twin.named, _Counts), _Counts(list(twin.reference.values()))
    for step in range(5):
        twin.backward(step)
        optimizer.step()
        one.step()
        assert twin.compared() > 0
        assert optimizer.param_groups[0]["k"] == step + 1
        assert optimizer.param_groups[0]["lr"] == one.param_groups[0]["lr"]
