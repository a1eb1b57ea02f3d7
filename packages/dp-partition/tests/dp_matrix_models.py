"""Models of the coverage matrix, with the step and the data of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dp_models as models
import torch
import torch.nn.functional as F
from torch import nn


class Noisy(nn.Module):
    """Dropout: both sides draw the same numbers from generators that are seeded alike."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Residual(nn.Module):
    """Convolutions with batch statistics and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.norm(self.conv(F.relu(x))))
        out: torch.Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 5, 4, 2, 1), nn.ConvTranspose2d(5, 3, 4, 2, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.up(F.silu(self.down(x))) - x
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = (
            nn.Embedding(31, 16),
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Linear(16, 31),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        out: torch.Tensor = self.head(x + self.mix(x, x, x, need_weights=False)[0])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.tokens(ids)))
        return out


class SoftMoE(nn.Module):
    """Every expert sees every token, weighted."""

    def __init__(self, top: int = 0) -> None:
        super().__init__()
        self.tokens, self.gate, self.top = nn.Embedding(31, 8), nn.Linear(8, 4, bias=False), top
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 4), nn.Parameter(torch.randn(4, 12, 8) / 4)
        self.head = nn.Linear(8, 31)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        weights = self.gate(x).softmax(-1)
        if self.top:
            best = weights.topk(self.top, dim=-1)
            weights = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
            weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.gelu(torch.einsum("bld,edh->bleh", x, self.up))
        mixed = torch.einsum("bleh,ehd,ble->bld", hidden, self.down, weights)
        out: torch.Tensor = self.head(x + mixed)
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.cell = nn.GRUCell(8, 8) if kind == "cell" else nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if isinstance(self.cell, nn.LSTM):
            hidden = self.cell(x)[0]
        else:
            state, states = torch.zeros_like(x[:, 0]), []
            for step in x.unbind(1):
                state = self.cell(step, state)
                states.append(state)
            hidden = torch.stack(states, 1)
        out: torch.Tensor = self.head(hidden)
        return out


class Contrast(nn.Module):
    """Every row against every other row: only global semantics sees the rows of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, v = F.normalize(self.left(x), dim=1), F.normalize(self.right(x), dim=1)
        return F.cross_entropy(3 * u @ v.T, torch.arange(x.shape[0], device=x.device))


def frozen_gpt() -> nn.Module:
    model = models.GPT()
    model.tokens.weight.requires_grad_(False)
    return model


class Logits(nn.Module):
    """A transformers model that returns its logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(*inputs).logits
        return out


def hugging_face(name: str, positions: int = 16) -> nn.Module:
    """A random-weight model of transformers, as small as it gets."""
    import transformers as hf

    small: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide: dict[str, Any] = {**small, "intermediate_size": 32, "max_position_embeddings": positions}
    if name == "gpt2":
        return Logits(
            hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=positions, use_cache=False)
            )
        )
    if name == "llama":
        return Logits(hf.LlamaForCausalLM(hf.LlamaConfig(**wide, num_key_value_heads=1, use_cache=False)))
    if name == "bert":
        return Logits(hf.BertForMaskedLM(hf.BertConfig(**wide)))
    if name == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return Logits(hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)))
    raise KeyError(name)


def rows_mean(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss: Any = model(x).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def value_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = model(x)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def vectors(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def images(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def tokens(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return models.tokens(generator, rows=rows)


def alone(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return (torch.randn(rows, 8, generator=generator),)


Made = tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[torch.Generator, int], tuple[Any, ...]], str]

MODELS: dict[str, Made] = {
    "MLP": (partial(models.mlp, 8, 5), models.class_step, vectors, "local"),
    "MLP, LayerNorm, dropout": (Noisy, models.class_step, vectors, "local"),
    "GPT, SDPA": (models.GPT, models.token_step, tokens, "local"),
    "GPT, tied": (partial(models.GPT, tied=True), models.token_step, tokens, "local"),
    "GPT, frozen embedding": (frozen_gpt, models.token_step, tokens, "local"),
    "Conv, BatchNorm, GroupNorm": (models.Conv, models.class_step, images, "local"),
    "residual Conv, BatchNorm": (Residual, models.class_step, images, "local"),
    "Conv autoencoder, scalar": (Autoencoder, rows_mean, images, "local"),
    "MultiheadAttention": (Attention, models.token_step, tokens, "local"),
    "TransformerEncoderLayer, dropout": (Encoder, models.token_step, tokens, "local"),
    "MoE, soft": (SoftMoE, models.token_step, tokens, "local"),
    "MoE, top 2": (partial(SoftMoE, 2), models.token_step, tokens, "local"),
    "GRU cell, unrolled": (partial(Recurrent, "cell"), models.token_step, tokens, "local"),
    "LSTM": (partial(Recurrent, "lstm"), models.token_step, tokens, "local"),
    "contrastive loss (global)": (Contrast, value_step, alone, "global"),
    "Conv, BatchNorm (global)": (models.Conv, models.class_step, images, "global"),
    "transformers GPT-2": (partial(hugging_face, "gpt2"), models.token_step, tokens, "local"),
    "transformers Llama": (partial(hugging_face, "llama"), models.token_step, tokens, "local"),
    "transformers BERT": (partial(hugging_face, "bert"), models.token_step, tokens, "local"),
    "transformers ViT": (partial(hugging_face, "vit"), models.class_step, images, "local"),
}

# These under global semantics as well: no dropout, whose numbers one device would draw otherwise.
ALSO_GLOBAL = ("MLP", "GPT, tied", "GPT, frozen embedding", "residual Conv, BatchNorm", "Conv autoencoder, scalar",
               "MultiheadAttention", "MoE, soft", "MoE, top 2", "GRU cell, unrolled", "transformers Llama",
               "transformers ViT")  # fmt: skip
UNDER_GLOBAL: dict[str, Made] = {f"{name} (global)": (*MODELS[name][:3], "global") for name in ALSO_GLOBAL}
