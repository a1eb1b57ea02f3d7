"""A GPT in plain PyTorch: nothing in this file knows that there is more than one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `vocab` is 256 because the tokens are bytes."""

    vocab: int = 256
    context: int = 128
    dim: int = 128
    heads: int = 4
    layers: int = 3
    experts: int = 0  # 0: an MLP in each block; else a mixture of so many, two of them for each byte


class Attention(nn.Module):
    """Causal self-attention with one projection each for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.num_heads = config.heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, time, dim]
        def split(t: Tensor) -> Tensor:  # -> [batch, heads, time, head_dim]
            heads: Tensor = t.unflatten(-1, (-1, self.head_dim))
            return heads.transpose(1, 2)

        out = F.scaled_dot_product_attention(split(self.wq(x)), split(self.wk(x)), split(self.wv(x)), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]  # nn.Module.__call__ is Any


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]  # nn.Module.__call__ is Any


class Experts(nn.Module):
    """MLPs of half the width, each weight in one stack."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.up = nn.Parameter(torch.randn(config.experts, 2 * config.dim, config.dim) * 0.02)
        self.down = nn.Parameter(torch.randn(config.experts, config.dim, 2 * config.dim) * 0.01)

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:  # [tokens, dim], [tokens, 2] twice
        output = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            token, place = torch.where(experts == index)
            y = F.gelu(tokens[token] @ self.up[index].T) @ self.down[index].T
            output = output.index_add(0, token, y * weights[token, place, None])
        return output


class Mixture(nn.Module):
    """A router that sends each token to two experts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return self.experts(tokens, experts, weights).view_as(x)  # type: ignore[no-any-return]  # nn.Module.__call__


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = Mixture(config) if config.experts else MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]  # nn.Module.__call__ is Any


class GPT(nn.Module):
    """Logits of the next byte; with `targets`, their mean cross entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:  # ids, targets: [batch, time]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # [batch, time, vocab]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_model(config: GPTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """The same weights on every rank that asks with the same seed; drawn in float32 whatever the dtype."""
    torch.manual_seed(seed)
    model = GPT(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 if "wo" not in name and "down" not in name else 0.01)
    return model.to(dtype)
