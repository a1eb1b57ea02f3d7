"""On a GPU: two ranks train as one process does, no call waits for the device, and a step is timed beside torch's.

    OUT=FOLDER nox -s "tests(dp-partition)" -- -m gpu --ranks-device cuda

`--ranks-device cpu` runs the same tests on a small model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import dp_partition
import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

# torch's compiler warns of its own use, and an eager step of being eager.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(*blocks(8, 3)),
    "recurrent": lambda: nn.GRU(8, 8, batch_first=True),  # cuDNN would keep gathered weights in memory of its own
}


def blocks(width: int, count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count)]


def mean_square(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    loss: torch.Tensor = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_step(ranks: Ranks, style: Any, way: str) -> Callable[[], torch.Tensor]:
    """A step with its arguments: dp-partition's as a graph, eager, or of a compiled model; or torch's DDP and FSDP2."""
    device = ranks.device
    width, layers, rows = (2048, 8, 4096) if device.type == "cuda" else (32, 2, 8)
    torch.manual_seed(0)  # each way starts from the same weights and rows
    model: nn.Module = nn.Sequential(*blocks(width, layers)).to(device)
    mesh = ranks.mesh((1,), ("dp",))
    if way == "torch" and style == "replicate":
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "torch":
        for block in (*model.children(), model):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=device.type == "cuda")

    step: Any = mean_square
    if way != "torch":
        door: Any = dp_partition.compile if way == "graph" else dp_partition.distribute
        step = door(mean_square, mesh=mesh, style=style, check="first")
    called: Any = torch.compile(model) if way == "compiled" else model
    return partial(step, called, optimizer, torch.randn(rows, width, device=device))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_later_steps_do_not_wait_for_the_device(ranks: Ranks, style: str, way: str) -> None:
    step = train_step(ranks, style, way)
    losses = [step() for _ in range(3)]  # the first three calls of an eager step in shards are compared
    with ranks.no_host_waits():
        losses += [step() for _ in range(3)]
    assert torch.stack(losses).isfinite().all()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_each_way_trains_as_torch_does_and_is_timed_beside_it(ranks: Ranks, style: str) -> None:
    """Five steps of each way have torch's losses; then all ways are timed in turns."""
    ways = ("torch", "graph", "eager", "compiled")
    steps = {way: train_step(ranks, style, way) for way in ways}
    losses = {way: [step().item() for _ in range(5)] for way, step in steps.items()}
    times = {way: [ranks.seconds(step) for _ in range(4)] for way, step in steps.items()}
    ratios = {way: sorted(own / base for own, base in zip(times[way], times["torch"], strict=True)) for way in ways}
    error = max(abs(a - b) for way in ways for a, b in zip(losses[way], losses["torch"], strict=True))
    ranks.write_row(what=style, torch_ms=1e3 * times["torch"][0], ratios=ratios, compared=15, largest_difference=error)
    assert error <= 1e-4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp_partition.distribute, dp_partition.compile])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one_process(ranks: Ranks, name: str, style: Any, door: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(ranks.device, torch.float64)
    parallel = copy.deepcopy(model)
    mesh = ranks.mesh((2,), ("dp",))
    step = door(mean_square, mesh=mesh, style=style, check="first")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, parallel)]
    own_rows = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    for call in range(6):
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(call), dtype=torch.float64).to(ranks.device)
        want = mean_square(model, optimizers[0], x)
        with ranks.no_host_waits() if call == 5 else nullcontext():
            loss = step(parallel, optimizers[1], x[own_rows]).detach().clone()
        dist.all_reduce(loss)
        assert torch.allclose(loss / 2, want, rtol=1e-9), call
    step.release()
    for trained, reference in zip(parallel.parameters(), model.parameters(), strict=True):
        assert torch.allclose(trained, reference, rtol=1e-9, atol=1e-12)
