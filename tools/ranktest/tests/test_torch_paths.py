"""DDP, FSDP2, DTensor, compiled functional collectives and DCP work recorded and delayed, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def model(ranks: Ranks) -> torch.nn.Sequential:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    module.to(ranks.device)
    return module


def train(module: torch.nn.Module, ranks: Ranks, steps: int = 5) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + ranks.rank)).to(ranks.device)
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(ranks: Ranks) -> list[float]:
    return train(DistributedDataParallel(model(ranks), bucket_cap_mb=1e-4), ranks)


def fsdp(ranks: Ranks) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    module = model(ranks)
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module, ranks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_training(ranks: Ranks, wrap: Callable[[Ranks], list[float]]) -> None:
    plain = wrap(ranks)
    with ranks.record() as log:
        recorded = wrap(ranks)
    with ranks.delayed():
        delayed = wrap(ranks)
    assert plain == recorded == delayed
    assert len(set(plain)) == 5
    gradients = log.count("reduce_scatter") if wrap is fsdp else log.count("all_reduce")
    assert gradients >= 5
    assert log.bytes_sent() > 5 * 144 * 4 / 2


@pytest.mark.ranks(4)
def test_dtensor(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    full = torch.arange(64.0, device=ranks.device).view(8, 8)

    def moves() -> torch.Tensor:
        x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
        x = x.redistribute(placements=[Shard(1), Shard(0)]).redistribute(placements=[Replicate(), Shard(0)])
        product = x @ x.t()
        assert isinstance(product, DTensor)
        return product.full_tensor()

    plain = moves()
    with ranks.record() as log:
        recorded = moves()
    with ranks.delayed():
        delayed = moves()
    assert torch.equal(plain, recorded)
    assert torch.equal(plain, delayed)
    assert torch.equal(plain, full @ full.t())
    assert {event.ranks for event in log.events} <= {(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)}
    assert log.count("all_gather") >= 2


@pytest.mark.ranks(2)
def test_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    mesh = ranks.mesh((2,), ("dp",))
    saved = {"x": distribute_tensor(torch.arange(6.0, device=ranks.device), mesh, [Shard(0)])}
    loaded = {"x": distribute_tensor(torch.zeros(6, device=ranks.device), mesh, [Shard(0)])}
    with ranks.record() as log, ranks.delayed():
        save(saved, checkpoint_id=tmp_path)
        load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["x"].full_tensor(), torch.arange(6.0, device=ranks.device))
    assert log.count() > 0


@pytest.mark.ranks(2)
def test_group_is_torch_own(ranks: Ranks) -> None:
    """Recording does not change what a program sees of its groups."""
    assert dist.get_backend() == ranks.backend
    assert type(dist.group.WORLD).__name__ == "ProcessGroup"
