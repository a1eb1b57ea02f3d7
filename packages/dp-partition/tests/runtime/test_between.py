"""Between calls, numbers of shards and gradient hooks on them are refused, or right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.detach().sum().item(),
    "norm": lambda p: float(p.detach().norm()),
    "count": lambda p: int((p > 0.2).sum()),
    "greatest": lambda p: p.detach().abs().max().item(),
    "finite": lambda p: bool(torch.isfinite(p).all()),
    "gradient": lambda p: (p.detach() * 2).mean().item(),
}


def update(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_numbers_of_shards_between_calls(ranks: Ranks, door: Any) -> None:
    """A sum for a log was one rank's summand; a hook was never called."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = door(update, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(ranks.rank)).double()
    for _ in range(5):
        step(model, optimizer, x)
    shard: Any = model[0].weight
    assert type(shard).__name__ == "DTensor"
    refused: list[str] = []
    for name, read in READS.items():
        try:
            number = read(shard)
        except dp.PlanError as error:
            refused.append(str(error))
        else:  # some versions of torch gather the flags of `all()` themselves
            with step.unsharded():
                assert number == read(model[0].weight), name
    assert len(refused) >= 5 and all("[local-shard-as-full]" in text and "unsharded" in text for text in refused)
    if door is dp.distribute:
        handle = shard.register_hook(lambda gradient: gradient * 0)
        with pytest.raises(dp.PlanError, match=r"\[parameter-hooks\].*0.weight.*release"):
            step(model, optimizer, x)
        handle.remove()
    before: torch.Tensor = shard.detach().full_tensor()
    assert float(shard.detach().norm().full_tensor()) == pytest.approx(float(before.norm()), rel=1e-12)
    with torch.no_grad():
        shard.mul_(2.0)  # elementwise, on the shard itself
    with step.unsharded():
        full: Any = model[0].weight
        numbers = [READS[name](full) for name in READS]
        assert len(numbers) == len(READS) == 6 and torch.equal(full, before * 2)
        with torch.no_grad():
            full[0].zero_()
    assert shard.full_tensor()[0].count_nonzero() == 0
    for _ in range(2):
        step(model, optimizer, x)
    others = distribute_tensor(torch.ones(4), ranks.mesh((2,), ("dp",)), [Replicate()])
    assert others.sum().item() == 4.0
    step.release()
    assert float(model[0].weight.detach().norm()) > 0
