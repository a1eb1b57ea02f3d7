"""Models and train steps that several test modules share, and the comparison with one device."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dp_partition as dp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

Data = Callable[[torch.Generator], tuple[Any, ...]]
Optim = Callable[[Any], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 31, length: int = 8, width: int = 16, heads: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(1))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@contextmanager
def warns_once(ranks: Ranks, match: str) -> Iterator[None]:
    """The first rank warns in the block, and no other: one warning a job."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in caught]
    assert [re.search(match, text) is not None for text in texts] == [True] * (ranks.rank == 0), texts


def kinds_of(log: Any) -> tuple[str, ...]:
    """The collectives of a step as its graph names them: gloo carries a reduce_scatter as an all_to_all."""
    return tuple({"all_to_all": "reduce_scatter"}.get(op, op) for op in log.ops)


def mlp(width: int = 8, out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out))


class Conv(nn.Module):
    """Convolution (a backward with several outputs), batch statistics, group statistics, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(self.group(F.relu(self.batch(self.conv(x)))), 2)
        logits: torch.Tensor = self.head(hidden.mean((2, 3)))
        return logits


@functools.cache
def warm_up() -> None:
    """Compile a small step before ranks are forked: each rank pays a third less for its first calls.

    A test module says ``from dp_models import warm_up as before_ranks``. A build with CUDA skips it, as a backward
    starts threads there. Torch's fake group has none, and its messages deliver nothing that is used. Its mesh is like
    no test's: DTensor keeps layouts by mesh, and those of this rank are no other rank's.
    """
    if torch.version.cuda is not None:
        return
    dist.init_process_group("fake", rank=0, world_size=5)
    mesh = init_device_mesh("cpu", (5,), mesh_dim_names=("warm_up",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mlp()
        optim = torch.optim.AdamW(model.parameters())
        step = dp.compile(mean_step, mesh=mesh, style="fully_shard", check="never")
        for _ in range(2):
            step(model, optim, torch.ones(4, 8))
    dist.destroy_process_group()


def token_step(model: nn.Module, optim: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    ids, targets = batch
    loss: Any = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def class_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss: Any = F.cross_entropy(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def mean_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optim.zero_grad()
    loss: Any = model(x).square().mean()
    loss.backward()
    optim.step()
    return loss


def tokens(generator: torch.Generator, rows: int = 8, vocabulary: int = 31, length: int = 8) -> tuple[Any, ...]:
    shape = (rows, length)
    pair = [torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2)]
    return (tuple(pair),)


def vectors(generator: torch.Generator, rows: int = 8, width: int = 8) -> tuple[Any, ...]:
    return (torch.randn(rows, width, generator=generator, dtype=torch.float64),)


def images(generator: torch.Generator, rows: int = 8) -> tuple[Any, ...]:
    pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, 5, (rows,), generator=generator)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def rows_of(ranks: Ranks, batch: Any) -> Any:
    """A rank's rows of every tensor in a batch that has rows."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor.to(ranks.device)
        size = tensor.shape[0] // ranks.world_size
        return tensor[ranks.rank * size : (ranks.rank + 1) * size].to(ranks.device)

    return pytree.tree_map_only(torch.Tensor, part, batch)


def mean_over_ranks(ranks: Ranks, value: torch.Tensor) -> torch.Tensor:
    return torch.stack([one.cpu() for one in ranks.gather(value.detach().cpu())]).mean(0)


@contextmanager
def case(name: object) -> Iterator[None]:
    """One of several cases that share a test's ranks; a failure says which."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise


def worst_difference(model: nn.Module, reference: nn.Module) -> tuple[float, int]:
    """Greatest difference between two models' parameters relative to the greatest value, and how many were compared."""
    worst, count = 0.0, 0
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        scale = other.abs().max().item() or 1.0
        worst = max(worst, (one.detach().cpu() - other.detach()).abs().max().item() / scale)
        count += other.numel()
    return worst, count


def compare_with_one_device(
    ranks: Ranks,
    function: Callable[..., Any],
    make: Callable[[], nn.Module],
    optim: Optim,
    data: Data,
    *,
    steps: int = 6,
    rtol: float = 1e-10,
    **settings: Any,
) -> dp.CompiledStep:
    """Train on all ranks and on one device, and compare losses of every step and parameters after the last."""
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    reference = seeded(make).double()
    model = copy.deepcopy(seeded(make, seed=ranks.rank).double()).to(ranks.device)  # ranks start apart: rank 0 counts
    own, theirs = optim(model.parameters()), optim(reference.parameters())
    step = dp.compile(function, mesh=mesh, **settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        batch = data(generator)
        loss = step(model, own, *rows_of(ranks, batch))
        if settings.get("semantics") == "global":
            mean = loss.cpu()
        else:
            mean = mean_over_ranks(ranks, loss)
        expected = function(reference, theirs, *batch).detach()
        torch.testing.assert_close(mean, expected, rtol=rtol, atol=0)
    with step.unsharded():
        worst, count = worst_difference(model, reference)
    assert count == sum(p.numel() for p in reference.parameters()) > 0
    assert worst < rtol * 100, worst
    assert step.num_traces == 1, "the second call must reuse the first call's graph"
    return step
