"""A user's model, `mypackage.models:make` in the docs: commands read its names and shapes and run no forward."""

from __future__ import annotations

from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.heads = 16
        self.attn.wq, self.attn.wk, self.attn.wv, self.attn.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    def __init__(self, width=64, layers=4, vocab=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)


def make():
    return Model()
