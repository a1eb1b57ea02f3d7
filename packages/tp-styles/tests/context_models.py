"""A language model of one's own on shards of a sequence, and the memory that its forward leaves to backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class OwnAttention(nn.Module):
    """Attention by torch's function, of 4 heads and 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        result: torch.Tensor = self.out(out.transpose(1, 2).flatten(-2))
        return result


class Own(nn.Module):
    """A language model with positions as an input; `repeat` checkpoints each block, or all of them."""

    def __init__(self, repeat: str = "", length: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(48, 16), nn.Embedding(length, 16)
        self.blocks = nn.ModuleList(OwnAttention() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embed.weight
        self.repeat = repeat

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for block in self.blocks:
            if self.repeat:
                x = x + checkpoint(block, x, mask, use_reentrant=self.repeat == "reentrant")
            else:
                x = x + block(x, mask)
        for index, expert in enumerate(self.experts):  # the second has tokens of the second rank alone
            chosen = position_ids.expand(x.shape[:2]) >= 8 * index
            if bool(chosen.any()):
                y = torch.zeros_like(x)
                y[chosen] = expert(x[chosen])
                x = x + y
        result: torch.Tensor = self.head(x)
        return result


class Block(nn.Module):
    """Attention of 8 heads and a feed-forward, each after a norm, as in today's language models."""

    def __init__(self, width: int = 64, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.size = width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * kv_heads * self.size)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q = self.q(h).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, -1, self.size)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.silu(self.up(self.norms[1](x))))
        return result


class Deep(nn.Module):
    """A language model of such blocks."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, width), nn.Linear(width, 48, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def saved_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Return the bytes that autograd keeps of one forward, each memory once; parameters do not count."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # alive until the end: no memory is used twice

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(*inputs)
    return sum(storage.nbytes() for storage in storages.values())
