"""Files that pages of the docs name: a user's model, a Hugging Face config and folder, a safetensors file, plans."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("mypackage", "path/to/config.json", "model.safetensors", "before.json", "after.json", "qwen3-tiny")
MODELS = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = 16
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, width=64, layers=4, vocab=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make():
    return Model()
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def write(folder: Path) -> None:
    """Put the files where the commands look for them."""
    from safetensors.torch import save_file
    from shard_spec.planners import FullyShardPlanner, MegatronPlanner

    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "models.py").write_text(MODELS)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_text(json.dumps(CONFIG))
    namespace: dict[str, object] = {}
    exec(compile(MODELS, "models.py", "exec"), namespace)
    model = namespace["make"]()  # type: ignore[operator]
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "before.json").write_text(MegatronPlanner({"tp": 8}).build_plan(model).to_json())
    (folder / "after.json").write_text(FullyShardPlanner({"dp": 8}).build_plan(model).to_json())
    _write_huggingface(folder / "qwen3-tiny")


def _write_huggingface(folder: Path) -> None:
    """Write a model of two layers as a Hugging Face folder: config, index and several files."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder, max_shard_size="40KB")
