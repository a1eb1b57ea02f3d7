"""On GPUs, two NCCL ranks: owners' updates are those of one process on that device.

    OUT=FOLDER nox -s "tests(shard-reshard)" -- -m gpu --ranks-device cuda --ranks-per-gpu 2

`--ranks-device cpu` runs the same test over gloo.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_on_owners(ranks: Ranks, dtype: torch.dtype) -> None:
    side = 2048 if ranks.device.type == "cuda" else 32
    mesh = ranks.mesh((2,), ("fsdp",))
    torch.manual_seed(0)
    full = {f"w{n}": torch.randn(side, side + 8 * n, device=ranks.device, dtype=dtype) for n in range(4)}
    named = {name: nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for name, value in full.items()}
    reference = {name: nn.Parameter(value.clone()) for name, value in full.items()}

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=0.02)

    optimizer, one = WholeMatrices(named, make, bucket_bytes=side * side * 4), make(list(reference.values()))
    compared = 0
    for step in range(6):
        torch.manual_seed(step + 1)
        for name, parameter in named.items():
            gradient = torch.randn_like(reference[name])
            reference[name].grad, parameter.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        one.step()
        for name, value in named.items():
            moved: Any = value.detach()
            assert torch.equal(moved.full_tensor(), reference[name]), (step, name)
            compared += value.numel()
    assert compared == 6 * sum(value.numel() for value in full.values())
    if ranks.device.type == "cuda":
        seconds = ranks.seconds(optimizer.step)
        ranks.write_row(name="WholeMatrices of Muon", matrices=len(full), side=side, dtype=str(dtype), seconds=seconds)
