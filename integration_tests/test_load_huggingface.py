"""A Hugging Face folder is loaded onto ranks, sharded by its own plan, and writes the same text as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranktest import Ranks
from shard_reshard import PlanError, load_safetensors, reshard_state_dict
from tp_styles import apply_plan, from_hf_tp_plan

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _generated(model: Any) -> list[int]:
    tokens = model.generate(torch.arange(1, 7)[None], max_new_tokens=12, min_new_tokens=12, do_sample=False)
    text: list[int] = tokens[0].tolist()
    return text


@pytest.mark.filterwarnings("ignore")  # transformers and torch warn of their own use
@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_folder_onto_ranks_generates_what_one_process_does(ranks: Ranks, tied: bool, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0]) / "model"
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=tied)
    full = transformers.Qwen3ForCausalLM(config).eval()  # 2 key-value heads on 4 ranks: each head lies on two ranks
    if ranks.rank == 0:
        full.save_pretrained(folder, max_shard_size="40KB")
    ranks.gather(None)
    mesh = ranks.mesh((4,), ("tp",))

    def on_meta(rotary: bool) -> Any:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
        if rotary:
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        apply_plan(model, mesh, from_hf_tp_plan(model))
        return model

    with pytest.raises(PlanError, match=r"\[uninitialized-buffer\] model.rotary_emb.inv_freq"):
        load_safetensors(folder, out=on_meta(rotary=False))
    model = on_meta(rotary=True)
    loaded = load_safetensors(folder, out=model)
    assert len(loaded.materialized) == len(dict(model.named_parameters(remove_duplicate=False))) == 25
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert loaded.read_bytes < sum(tensor.nbytes for tensor in full.parameters()) / 2
    assert _generated(model) == _generated(full)
    # All weights go back to one rank bit for bit, the copied key-value heads as well.
    full_state = reshard_state_dict(model.state_dict(), "rank 0")
    compared = 0
    for name, value in full.state_dict().items() if ranks.rank == 0 else ():
        assert torch.equal(full_state[name], value), name
        compared += 1
    assert compared == (25 if ranks.rank == 0 else 0)
