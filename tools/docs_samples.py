"""Files that pages of the docs name: a user's model, a Hugging Face config, a safetensors file, plans."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("mypackage", "path/to/config.json", "model.safetensors", "before.json", "after.json")
# The commands read names and shapes alone: no forward.
MODELS = """
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
