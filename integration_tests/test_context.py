"""Shards of a sequence under DDP by the bridge: beside data and tensor parallelism, equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH, VOCAB, LENGTH = 16, 24, 8


class Block(nn.Module):
    """Attention of 4 heads and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.silu(self.up(self.norm2(x))))
        return result


class LM(nn.Module):
    """A language model that takes its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


HEADS: dict[str, Any] = {
    "blocks.*.[qkv]": tp_styles.ColwiseParallel(),
    "blocks.*.o": tp_styles.RowwiseParallel(),
    "blocks.*.up": tp_styles.ColwiseParallel(),
    "blocks.*.down": tp_styles.RowwiseParallel(),
}


def new_model() -> LM:
    torch.manual_seed(0)
    return LM().double()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, torch.arange(LENGTH)[None])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained_beside(wrapped: nn.Module, rows: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Train a model and one process for three steps; compare clipped norms and all parameters; return the count."""
    alone = new_model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (wrapped, alone)]
    for step in range(3):
        ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(wrapped, rows(ids)).backward()
        loss_of(alone, ids).backward()
        norm = tp_ddp_bridge.clip_grad_norm_(wrapped.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1), rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    state = {name.removeprefix("module."): value for name, value in wrapped.state_dict().items()}
    for name, value in alone.state_dict().items():
        full = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        torch.testing.assert_close(full, value, rtol=0, atol=1e-12)
    return sum(value.numel() for value in alone.state_dict().values())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["ulysses", "gather"])
def test_sequences_inside_of_ddp_train_as_one_process(ranks: Ranks, kind: Any) -> None:
    """The sum over the sequence is the style's, or DDP averages over data and sequence; then beside heads."""
    mesh = ranks.mesh((ranks.world_size // 2, 2), ("dp", "cp"))
    row, count = mesh["dp"].get_local_rank(), ranks.world_size // 2

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return ids.chunk(count)[row]

    ways: tuple[tuple[Literal["sum", "mean"], Any], ...] = (("sum", mesh["dp"]), ("mean", mesh))
    for gradients, data in ways:
        model = new_model()
        handle = tp_styles.apply_plan(model, mesh["cp"], tp_styles.ContextParallel(kind, gradients=gradients))
        assert trained_beside(tp_ddp_bridge.wrap_ddp(model, mesh=data), rows) > 5000
        assert "check of LM (training, with gradients): equal to the original" in handle.report()
    if ranks.world_size == 2:
        return
    both = ranks.mesh((2, 2), ("cp", "tp"))
    model = new_model()
    tp_styles.apply_plan(model, both["tp"], HEADS)
    loss_of(model, torch.arange(4 * LENGTH).view(4, LENGTH) % VOCAB).backward()  # heads are checked by themselves
    model.zero_grad()
    tp_styles.apply_plan(model, both["cp"], tp_styles.ContextParallel(kind, gradients="mean"))
    assert trained_beside(tp_ddp_bridge.wrap_ddp(model, mesh=both), lambda ids: ids) > 5000
