"""shard-reshard's WholeMatrices in dp-partition's steps: bits of torch's Muon on full matrices, or refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import dp_partition as dp
import pytest
import torch
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch import nn
from torch.nn import functional as F

CALLS = 6


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Both:
    """Torch's own optimizers of the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self.parts = [muon([p for _, p in named if p.ndim == 2]), adamw([p for _, p in named if p.ndim != 2])]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def whole(model: nn.Module) -> WholeMatrices:
    return WholeMatrices(model.named_parameters(), {"*weight": muon}, in_shards=adamw, owners={"0.weight": 1})


def train(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def trained(ranks: Ranks, make: Any, style: Any, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)  # WholeMatrices itself refuses full tensors that differ between ranks
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 6)).to(dtype)
    optim = make(model)
    step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no call is compared: owners' masters are not copied
        for call in range(CALLS):
            generator = torch.Generator().manual_seed(10 * call + ranks.rank)
            x, y = (torch.randn(8, size, generator=generator).to(dtype) for size in (16, 6))
            step(model, optim, x, y)
    return step, model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_distributed_step_gives_the_bits_of_full_matrices(ranks: Ranks, dtype: torch.dtype) -> None:
    _, want = trained(ranks, Both, "replicate", dtype)
    for style in ("replicate", "fully_shard"):
        step, model = trained(ranks, whole, style, dtype)
        if style == "fully_shard":
            assert "full: 0.bias: WholeMatrices communicates by itself" in step.explain()
        compared = 0
        for got, expected in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(got, expected), style
            compared += got.numel()
        assert compared == 16 * 12 + 12 + 12 * 6 + 6


@pytest.mark.ranks(2)
def test_a_graph_refuses_an_optimizer_that_communicates_by_name(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 6, bias=False))
    optim = WholeMatrices(model.named_parameters(), muon)
    before = [p.detach().clone() for p in model.parameters()]
    rows = torch.ones(4, 16), torch.ones(4, 6)
    for style in ("replicate", "fully_shard"):
        step = dp.compile(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
        with pytest.raises(dp.PlanError, match=r"the optimizer WholeMatrices .*dp_partition\.distribute runs the step"):
            step(model, optim, *rows)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style="replicate")(model, optim, *rows)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
