"""Between calls, numbers of shards, gradient hooks on them and writes through views are refused, or right."""

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


ROW = torch.arange(6.0).double()
# Writes to a matrix of 10 x 6: through views of each kind and their chains, by index, by lists and by `out=`.
WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda w: w[0].zero_(),
    "row by item": lambda w: w.__setitem__(0, 0.0),
    "row by values": lambda w: w.__setitem__(0, ROW),
    "row copied": lambda w: w.select(0, 3).copy_(ROW),
    "element": lambda w: w.__setitem__((0, 0), 5.0),
    "element of a row": lambda w: w[0][0].zero_(),
    "rows": lambda w: w[:2].mul_(2),
    "rows again": lambda w: w.__setitem__(slice(0, 2), w[:2].__imul__(2)),
    "column": lambda w: w[:, 0].zero_(),
    "column by item": lambda w: w.__setitem__((slice(None), 0), 0.0),
    "elements of all": lambda w: w.view(-1)[:3].zero_(),
    "all": lambda w: w.view(-1).zero_(),
    "transposed column": lambda w: w.t()[0].zero_(),
    "transposed row": lambda w: w.t()[:, 0].zero_(),
    "permuted": lambda w: w.permute(1, 0)[0].zero_(),
    "unbound": lambda w: w.unbind()[0].zero_(),
    "split": lambda w: w.split(2)[0].zero_(),
    "split by sizes": lambda w: w.split([3, 7])[1].zero_(),
    "chunk": lambda w: w.chunk(2)[0].zero_(),
    "tensor_split": lambda w: w.tensor_split(2)[0].zero_(),
    "narrow": lambda w: w.narrow(0, 0, 1).zero_(),
    "diagonal": lambda w: w.diagonal().zero_(),
    "flat": lambda w: w.flatten().__setitem__(0, 0.0),
    "other sizes": lambda w: w.view(4, 15)[1].zero_(),
    "unflattened": lambda w: w.unflatten(0, (2, 5))[0].zero_(),
    "unsqueezed": lambda w: w.unsqueeze(0)[0, 0].zero_(),
    "data": lambda w: w.data[0].zero_(),
    "detached": lambda w: w.detach()[0].zero_(),
    "view of a row": lambda w: w[0].view(2, 3).detach().add_(1),
    "init": lambda w: nn.init.zeros_(w[0]),
    "function": lambda w: torch.zero_(w[0]),
    "list": lambda w: torch._foreach_mul_([w[:, 1], w[0]], 0.0),
    "out": lambda w: torch.mul(w[0], 0.0, out=w[0]),
    "mask": lambda w: w.__setitem__(torch.ones(10, 6).bool(), 0.0),
    "filled mask": lambda w: w.masked_fill_(torch.ones(10, 6).bool(), 1.0),
    "indices": lambda w: w.__setitem__([0, 1], 0.0),
    "elementwise": lambda w: w.mul_(2.0),
}
DRAWS: tuple[Callable[[Any], Any], ...] = (
    *(nn.init.normal_, nn.init.xavier_uniform_, nn.init.trunc_normal_, torch.randn_like, torch.rand_like),
    *(torch.bernoulli, nn.functional.dropout, lambda w: w.data.uniform_(), lambda w: w.detach().bernoulli_(0.5)),
)
LOOKS: dict[str, Callable[[Any], Any]] = {
    "row": lambda w: w[0],
    "rows": lambda w: w[2:7] * 2,
    "copy": lambda w: w[0].clone().zero_(),
    "stacked": lambda w: torch.stack([w[0], w[9]]),
    "chain": lambda w: w[0].view(2, 3).t(),
    "norm": lambda w: w[3].norm(),
    "split": lambda w: w.split(4)[1].sum(0),
    "beside": lambda w: w[1] + w[2].detach(),
    "into another": lambda w: (w[0] * 0).add_(w[1]),
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


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="before torch 2.13 operators on a subclass of DTensor do not reach it",
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_no_write_through_a_view_is_lost(ranks: Ranks, door: Any) -> None:
    """A view of rows is a copy on each rank: `weight[0].zero_()` changed nothing, and nothing said so."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = door(update, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(ranks.rank)).double()
    for _ in range(3):
        step(model, optimizer, x)
    outcomes, named = {"right": 0, "torch's own error": 0}, list[str]()
    for shard in (model[0].weight, optimizer.state[model[0].weight]["momentum_buffer"]):
        before = shard.detach().full_tensor()
        for name, look in LOOKS.items():
            assert torch.equal(look(shard.detach()).full_tensor(), look(before)), name
        for name, write in WRITES.items():
            wanted = before.clone()
            write(wanted)
            try:
                with torch.no_grad():
                    write(shard)
            except dp.PlanError as error:
                named.append(str(error))
            except (RuntimeError, NotImplementedError):
                outcomes["torch's own error"] += 1
            else:
                assert torch.equal(shard.detach().full_tensor(), wanted), name
                outcomes["right"] += 1
            with torch.no_grad():
                shard.copy_(distribute_tensor(before, shard.device_mesh, shard.placements))
    assert sum(outcomes.values()) + len(named) == 2 * len(WRITES), outcomes
    assert len(named) >= 56 and outcomes["right"] >= 10, (len(named), outcomes)
    assert all("within `with step.unsharded():`" in text for text in named)
    for draw in DRAWS:  # each rank would draw the same rows
        with pytest.raises(dp.PlanError, match=r"draw the same rows .*test_between.py.*unsharded"):
            draw(model[0].weight)
    first = model[0].weight[0].sum()  # a gradient through such a view arrives
    gradient: Any = torch.autograd.grad(first, [model[0].weight])[0]
    assert torch.equal(gradient.full_tensor()[0], torch.ones(6).double()) and int(gradient.full_tensor().sum()) == 6
    step(model, optimizer, x)
    step.release()
