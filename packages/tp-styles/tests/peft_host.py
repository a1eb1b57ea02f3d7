"""LoRA of peft under tensor parallelism: equal to one process, or refused; `nox -s peft` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tp_styles as tp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from ranktest import Ranks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3": "all-linear",
    "mistral": ["k_proj", "up_proj"],
    "qwen2": "all-linear",
    # Refused as `module-kind`: adapters on glm4's fused MLP and on olmo2's attention.
    "glm4": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "olmo2": ["gate_proj", "up_proj", "down_proj"],
    "gemma": "all-linear",
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,  # glm4's own is above the vocabulary
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES)).double()


def adapted(model: Any, family: str) -> Any:
    torch.manual_seed(1)  # both A and B drawn: with B = 0, as peft begins, A would have no gradient in the first step
    config = LoraConfig(r=3, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS[family], init_lora_weights=False)
    return get_peft_model(model, config)


def train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(5):
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        tp.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", list(TARGETS))
def test_five_steps_are_those_of_one_process(ranks: Ranks, family: str) -> None:
    alone = adapted(model_of(family), family)
    wanted = train(alone)
    model = adapted(model_of(family), family)
    inner = model.get_base_model()
    tp.apply_plan(inner, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(inner))
    assert train(model) == pytest.approx(wanted, rel=1e-6)  # transformers takes the loss in float32
    assert wanted[4] != wanted[0]
    adapters = get_peft_model_state_dict(model)
    reference = get_peft_model_state_dict(alone)
    assert adapters.keys() == reference.keys()
    sharded = 0
    for name, value in adapters.items():
        full = value
        if isinstance(value, DTensor):
            full, sharded = value.full_tensor(), sharded + (value.to_local().shape != value.shape)
        torch.testing.assert_close(full, reference[name], rtol=1e-6, atol=1e-8)
    assert sharded >= 2 * 2  # two layers


@pytest.mark.ranks(2)
def test_adapters_after_the_plan_are_refused(ranks: Ranks) -> None:
    """Peft sizes A and B by the shard that it finds: trained without a word, as another model on each rank."""
    model = model_of("llama")
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(model))
    with pytest.raises(tp.PlanError, match=r"model-changed.*lora_A.*LoRAParallel"):
        train(adapted(model, "llama"))


def test_a_plan_for_the_wrapper_names_the_model_inside() -> None:
    with pytest.raises(tp.PlanError, match=r"unmatched-pattern.*get_base_model"):
        tp.from_hf_tp_plan(adapted(model_of("llama"), "llama"))
