"""Hugging Face's plans, on tiny random models of several families; the benchmark runs all of `hf_models.FAMILIES`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hf_models
import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from tp_styles._shared.patterns import Pattern
from tp_styles.hf.names import EXPERTS, OLDER, TODAY, todays_names

SAMPLE = ["gemma2", "phi3", "qwen2_moe", "granitemoe", "deepseek_v2", "stablelm"]


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_families(ranks: Ranks) -> None:
    """Logits, gradients and generation by the model's own plan, and what it leaves whole; Stablelm has no plan."""
    mesh = ranks.mesh((2,), ("tp",))
    for family in SAMPLE:
        steps = 5 if family in ("granitemoe", "stablelm") else 0
        assert hf_models.check_by(family, mesh, "auto_plan", steps)["share"] >= 0.95
    _from_a_configuration()


def _from_a_configuration() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**hf_models.SMALL)
    styles = tp.from_hf_tp_plan(config)
    assert styles["model.layers.0.self_attn"] == tp.GQAParallel(num_heads=4, num_kv_heads=2, kv_replicate=True)
    assert styles["model.embed_tokens"] == tp.RowwiseParallel()


def test_names_of_styles() -> None:
    assert todays_names({"a": "colwise_rep", "b": "rowwise"}) == {"a": "colwise_gather_output", "b": "rowwise"}
    assert set(OLDER.values()) <= set(TODAY)
    assert len(TODAY) == 15
    with pytest.raises(tp.PlanError) as caught:
        todays_names({"a": "colwis", "b": "x", "c": "rowwise"})
    assert len(caught.value.problems) == 2
    with pytest.raises(tp.PlanError, match="missing-argument"):
        tp.from_hf_tp_plan(nn.Linear(2, 2))


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_plan_of_transformers_by_name() -> None:
    """Each style name of each tensor-parallel plan has a meaning, and each pattern is one; expert plans are refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = {CONFIG_MAPPING[key] for key in CONFIG_MAPPING}
    plans = [plan for kind in kinds if (plan := getattr(kind, "base_model_tp_plan", None))]
    experts = [plan for kind in kinds if (plan := getattr(kind, "base_model_ep_plan", None))]
    assert (len(plans) >= 132, len(experts) >= 67) == (True, True), (len(plans), len(experts))
    names = 0
    for plan in plans:
        assert set(todays_names(plan).values()) <= set(TODAY)
        names += sum(Pattern(key).is_exact or Pattern(key).matches(key.replace("*", "0")) for key in plan)
    assert names == sum(map(len, plans))
    for plan in experts:
        with pytest.raises(tp.PlanError, match="expert-parallel") as caught:
            todays_names(plan)
        assert {problem.found for problem in caught.value.problems} <= {repr(name) for name in EXPERTS}


# Sub-configurations, without a causal model of their own or with defaults from which transformers' code builds none.
UNBUILT = {
    "cohere_compass_text",
    "deepseek_ocr2_text",
    "diffusion_gemma_text",
    "lfm2_moe",
    "qwen3_omni_moe_talker_text",
    "t5_gemma_module",
    "t5gemma2_decoder",
    "t5gemma2_text",
}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_model_with_a_plan_is_planned() -> None:
    """Each configuration with a plan, as a model on the meta device: its plan is accepted for two ranks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = {key: CONFIG_MAPPING[key] for key in CONFIG_MAPPING}
    kinds = {key: kind for key, kind in kinds.items() if getattr(kind, "base_model_tp_plan", None)}
    planned, refused, unbuilt = 0, {}, set()
    for key, kind in kinds.items():
        model = hf_models.on_meta(key, kind)
        if model is None:
            unbuilt.add(key)
            continue
        plan = tp.plan_styles(model, tp.from_hf_tp_plan(model), 2)
        divided = any(not spec.split.is_replicated for found in plan.modules for _, spec in found.spec.parameters)
        if plan.problems or not divided:
            refused[key] = [str(problem) for problem in plan.problems]
        planned += not plan.problems and divided
    # By default its blocks have no experts, and of these alone its plan speaks.
    assert (refused, unbuilt - UNBUILT) == ({"dots3_note_vision_encoder": []}, set())
    assert planned == len(kinds) - len(unbuilt) - 1 >= 132, (planned, len(kinds))


def test_auto_plan_of_torchs_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    plan = tp.auto_plan(model)
    assert sorted(plan) == ["decoder.layers.0", "encoder.layers.0"]
    assert tp.plan_styles(model, plan, 2).problems == ()


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=180)
def test_encoders(ranks: Ranks) -> None:
    """Relative biases that layers share, and heads whose bias is tied: plans are accepted and right."""
    import transformers

    mesh = ranks.mesh((2,), ("tp",))
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    image = {"image_size": 16, "patch_size": 4, "use_relative_position_bias": True}
    ids = {"input_ids": torch.arange(2, 18).view(2, 8)}
    pixels = {"pixel_values": torch.linspace(-1, 1, 768).view(1, 3, 16, 16)}
    makes: list[tuple[Callable[[], Any], dict[str, torch.Tensor]]] = [
        (lambda: transformers.T5EncoderModel(transformers.T5Config(**t5)), ids),
        (lambda: transformers.BeitModel(transformers.BeitConfig(**sizes, **image)), pixels),
        (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)), ids),
    ]
    for make, inputs in makes:
        model = models.seeded(make).eval()
        alone = copy.deepcopy(model)
        styles = tp.auto_plan(model, tp_size=2)
        assert any(isinstance(style, tp.RowwiseParallel) for style in styles.values())
        tp.apply_plan(model, mesh, styles)
        torch.testing.assert_close(model(**inputs)[0], alone(**inputs)[0], atol=1e-4, rtol=0)
    torch.manual_seed(ranks.rank)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    tp.apply_plan(model, mesh, tp.auto_plan(model, tp_size=2))
    with pytest.raises(tp.PlanError, match=r"replicas-differ.*position_embeddings"):
        model(**ids)
