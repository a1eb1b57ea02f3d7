"""Models and steps that several integration tests share; plain PyTorch in float64, where 1e-12 is a tolerance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """A pre-norm transformer block with separate query, key and value."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.num_heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class SmallGPT(nn.Module):
    """Return the mean cross entropy of the next token, or the logits where no targets are passed."""

    def __init__(self, vocab: int = 64, dim: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_model(seed: int = 0) -> SmallGPT:
    """Return a model whose weights depend on the random seed alone, so that every rank builds the same."""
    torch.manual_seed(seed)
    return SmallGPT().double()


def new_batches(num: int, rows: int = 8, time: int = 12, vocab: int = 64) -> list[tuple[Tensor, Tensor]]:
    """Return global batches of tokens and targets, equal on every rank."""
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randint(vocab, (rows, time + 1), generator=generator) for _ in range(num)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in draws]


def rows_of(batch: tuple[Tensor, Tensor], rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    ids, targets = batch
    return ids.chunk(num_ranks)[rank], targets.chunk(num_ranks)[rank]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Train one step as a user writes it for one device; returns the loss."""
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def reference(num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the weights of `num_steps` steps of the unsharded model on one device."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [train_step(model, optimizer, batch).item() for batch in new_batches(num_steps)]
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether each rank holds a part of a DTensor, as with `Shard(0)`; a replicated DTensor is not sharded."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
