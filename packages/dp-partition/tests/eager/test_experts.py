"""Mixtures of experts of transformers, as they are loaded: in float32, with their own grouped products."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import nn

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "Jamba": {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4,
        "use_mamba_kernels": False, "pad_token_id": 0,
    },
}  # fmt: skip


def train(model: nn.Module, optim: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss.detach()


@pytest.mark.extra("transformers")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("family", OWN)
def test_experts_in_float32_train_as_in_one_process(ranks: Ranks, family: str, style: Any) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | OWN[family])
    alone: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).train()
    model = copy.deepcopy(alone).to(ranks.device)
    optim, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            ids = torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(call))
            step(model, optim, ids[2 * ranks.rank :][:2].to(ranks.device))
            train(alone, own, ids)
    print(family, style, step.plan.checks[:300])
    step.release()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-3, atol=1e-5)
