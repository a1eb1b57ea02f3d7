"""MegatronPlanner on Hugging Face models: how much is cut on the real sizes, and that small ones compute right.

For each family, the model with its class's default configuration is analysed on the meta device: the share of
matmul-weight bytes that is cut, and exactly what is not. Then a small one with random weights is executed
(`verify_units`): each rank's summand of each block must not depend on channels that the rank does not hold.

By default every third family and those that differ most; ``SHARD_SPEC_ALL=1`` takes all of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from shard_spec.planners import MegatronPlanner
from torch import Tensor, nn
from units_referee import verify_units

LLAMA_SMALL = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
BERT_SMALL = {key: value for key, value in LLAMA_SMALL.items() if key != "num_key_value_heads"}
GPT2_SMALL = {
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 64,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """`rest`: parameters (numbers as ``*``) that stay whole in the default configuration."""

    model: str
    config: str
    small: dict[str, Any]
    default: dict[str, Any] = field(default_factory=dict)
    inputs: str = "ids"
    rest: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    num_units: int = 4  # attention and feed-forward units of the small model


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA_SMALL),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", LLAMA_SMALL),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA_SMALL, "head_dim": 12}),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**LLAMA_SMALL, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        rest=("model.layers.*.mlp.gate.weight",),
        dtype=torch.float32,  # grouped matmul knows no float64
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**LLAMA_SMALL, "head_dim": 12}),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LLAMA_SMALL, "head_dim": 12, "num_local_experts": 4},
        rest=("model.layers.*.mlp.gate.weight",),
        dtype=torch.float32,  # grouped matmul knows no float64
    ),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**LLAMA_SMALL, "head_dim": 12}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA_SMALL, "head_dim": 12}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA_SMALL, "head_dim": 12}),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT2_SMALL),
    "gpt-neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 48,
            "num_heads": 4,
            "num_layers": 2,
            "vocab_size": 64,
            "intermediate_size": 40,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "gpt-j": Family("GPTJForCausalLM", "GPTJConfig", {**GPT2_SMALL, "rotary_dim": 8}),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT_SMALL),
    "phi": Family("PhiForCausalLM", "PhiConfig", LLAMA_SMALL),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", LLAMA_SMALL),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**BERT_SMALL, "ffn_dim": 40, "word_embed_proj_dim": 48, "max_position_embeddings": 32},
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 48, "n_head": 4, "n_layer": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
        default={"hidden_size": 1024, "n_head": 16, "n_layer": 24},
    ),
    "falcon-40b-like": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA_SMALL, "num_kv_heads": 2, "new_decoder_architecture": True, "bos_token_id": 0, "eos_token_id": 0},
        default={"new_decoder_architecture": True, "num_attention_heads": 64, "num_kv_heads": 8, "hidden_size": 4096},
    ),
    "falcon-rw-like": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA_SMALL, "multi_query": False, "alibi": True, "bos_token_id": 0, "eos_token_id": 0},
        default={"multi_query": False, "alibi": True, "num_attention_heads": 32, "hidden_size": 2048},
    ),
    "mpt": Family(
        "MptForCausalLM", "MptConfig", {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 32}
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", "Starcoder2Config", {**LLAMA_SMALL, "bos_token_id": 0, "eos_token_id": 0}
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        "StableLmConfig",
        {**LLAMA_SMALL, "partial_rotary_factor": 0.5, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LLAMA_SMALL, "head_dim": 12, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
        default={"num_hidden_layers": 4},
        rest=("model.layers.*.mlp.router.weight",),
        dtype=torch.float32,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **LLAMA_SMALL,
            "head_dim": 12,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        default={"num_hidden_layers": 4},
        rest=("model.layers.*.feed_forward.router.weight",),
        num_units=6,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        "CohereConfig",
        {**LLAMA_SMALL, "use_qk_norm": True, "bos_token_id": 0, "eos_token_id": 0},
        default={"use_qk_norm": True},
    ),
    "albert": Family(
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**BERT_SMALL, "embedding_size": 16},
        default={"num_attention_heads": 64},
        rest=("albert.encoder.embedding_hidden_mapping_in.weight", "predictions.dense.weight"),
        num_units=2,  # one layer, used again and again
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", BERT_SMALL, rest=("cls.predictions.transform.dense.weight",)),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", BERT_SMALL, rest=("lm_head.dense.weight",)),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 48, "n_heads": 4, "n_layers": 2, "hidden_dim": 40, "vocab_size": 64},
        rest=("vocab_transform.weight",),
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**BERT_SMALL, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0},
        rest=("head.dense.weight",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 48, "d_kv": 10, "num_heads": 4, "num_layers": 2, "d_ff": 40, "vocab_size": 64},
        inputs="ids and decoder ids",
        num_units=10,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "d_model": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 36,
            "vocab_size": 64,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        inputs="ids and decoder ids",
        num_units=10,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**BERT_SMALL, "image_size": 8, "patch_size": 4},
        inputs="pixels",
        rest=("classifier.weight",),
    ),
    "dinov2": Family("Dinov2Model", "Dinov2Config", {**BERT_SMALL, "image_size": 8, "patch_size": 4}, inputs="pixels"),
}

MOE_SMALL = {
    **LLAMA_SMALL,
    "head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TOKENS_SMALL = {**LLAMA_SMALL, "head_dim": 12, "bos_token_id": 0, "eos_token_id": 0}
VISION_SMALL = {**BERT_SMALL, "image_size": 8, "patch_size": 4}


def newer(name: str, small: dict[str, Any] = TOKENS_SMALL, **more: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", small, **more)


def mixture(name: str, router: str, **more: Any) -> Family:
    return newer(name, MOE_SMALL, rest=(f"model.layers.*.{router}.weight",), dtype=torch.float32, **more)


FAMILIES |= {
    "glm4": newer("Glm4"),
    "smollm3": newer("SmolLM3"),
    "cohere2": newer("Cohere2"),
    "ernie4.5": newer("Ernie4_5"),
    "granite": newer("Granite"),
    "exaone4": newer("Exaone4"),
    "seed-oss": newer("SeedOss"),
    "hunyuan": newer("HunYuanDenseV1", default={"head_dim": 128}),
    "apertus": newer("Apertus"),
    "arcee": newer("Arcee"),
    "nemotron": newer("Nemotron", default={"num_key_value_heads": 8}),
    "ministral3": newer("Ministral3"),
    "vaultgemma": newer("VaultGemma"),
    "glm4-moe": mixture("Glm4Moe", "mlp.gate", num_units=5),
    "granite-moe": mixture("GraniteMoe", "block_sparse_moe.router"),
    "phi-moe": mixture("Phimoe", "mlp.router"),
    "clip": Family("CLIPVisionModel", "CLIPVisionConfig", VISION_SMALL, inputs="pixels"),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 36,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "vocab_size": 64,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
        },
        default={"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "vocab_size": 51864},
        inputs="sound and decoder ids",
        num_units=10,
    ),
}
# What stays whole in families whose attention, or what they have in its place, is not cut; see `Family.rest`.
SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64,
}
KEPT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**TOKENS_SMALL, **SHARING, "activation_sparsity_pattern": None},
        "heads-not-recognised",
    ),
    "gemma4": (  # its config raises for what differs between layers
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**TOKENS_SMALL, **SHARING},
        "heads-not-recognised",
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**TOKENS_SMALL, "layer_types": ["conv", "full_attention"]},
        "slices-mix",
    ),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", TOKENS_SMALL, "partial-gradient"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", MOE_SMALL, "partial-gradient"),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", MOE_SMALL, "partial-gradient"),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**MOE_SMALL, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16},
        "heads-not-recognised",
    ),
}


# What has an arrangement of its own is in every run.
EVERY_TIME = {"mixtral", "gpt2", "t5", "vit", "opt", "whisper"}
TRIED = [
    name
    for at, name in enumerate(FAMILIES)
    if (at % 3 == 0 and at < 34) or name in EVERY_TIME or os.environ.get("SHARD_SPEC_ALL")
]


def build(family: Family, options: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, family.config)(**options)
    model: nn.Module = getattr(transformers, family.model)(config)
    return model


def first_output(model: nn.Module, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (2, 7), generator=generator)
    if kind == "pixels":
        pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        out = model(pixel_values=pixels)
    elif kind == "sound and decoder ids":
        out = model(input_features=torch.randn(2, 8, 32, generator=generator).double(), decoder_input_ids=ids)
    elif kind == "ids":
        out = model(input_ids=ids)
    else:
        out = model(input_ids=ids, decoder_input_ids=ids.flip(0))
    value: Tensor = out[0]
    return value.detach()


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of transformers
@pytest.mark.parametrize("name", TRIED)
def test_family(name: str) -> None:
    family = FAMILIES[name]
    with torch.device("meta"):
        model = build(family, family.default)
    planner = MegatronPlanner({"dp": 2, "tp": 2})
    analysis = planner.analyse(model)
    assert analysis.sharded_share >= 0.95
    assert tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in analysis.rest)) == family.rest
    plan = planner.build_plan(model)
    assert plan.validate(model) == ()
    assert len(plan.plan) < 40
    assert len(plan.notes) < 10

    torch.manual_seed(0)
    small = build(family, family.small).to(family.dtype).eval()
    with torch.no_grad():
        for parameter in small.parameters():  # biases and norms too: zeros and ones hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    probed = MegatronPlanner({"tp": 2}).analyse(small)
    units = tuple(unit for unit in probed.units if unit.rows and unit.columns)
    assert len(units) == family.num_units
    assert verify_units(small, units, 2, lambda twin: first_output(twin, family.inputs)) == ()


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "gpt-neox", "mixtral"])
def test_agrees_with_the_models_own_plan(name: str) -> None:
    """The tensor-parallel plan that transformers ships for the family says column and row for the same modules."""
    model = build(FAMILIES[name], FAMILIES[name].small)
    cuts = {key: str(cut.placement) for key, cut in MegatronPlanner({"tp": 2}).analyse(model).cuts.items()}
    own = model.config.base_model_tp_plan  # type: ignore[union-attr]  # of transformers
    kinds = {"colwise": "S(0)", "rowwise": "S(1)", "packed_colwise": "I(1,[40,40])"}
    compared = 0
    for pattern, style in own.items():  # type: ignore[operator, union-attr]  # as above
        if style in kinds:
            path = re.compile(r"\w+\." + pattern.replace(".", r"\.").replace("*", r"\d+") + r"(\.weight)?")
            placements = {placement for key, placement in cuts.items() if path.fullmatch(key)}
            expected = "S(2)" if "experts" in pattern and style == "rowwise" else kinds[style]
            assert placements == {expected}, pattern
            compared += 1
    assert compared >= 4


@pytest.mark.extra("transformers")
@pytest.mark.parametrize(
    ("model", "config", "options", "code"),
    [
        # A norm over all heads of q and of k; transformers' own plan gathers them first.
        ("Olmo2ForCausalLM", "Olmo2Config", LLAMA_SMALL, "partial-gradient"),
        # Norms over all channels before the last linear of each block.
        ("BitNetForCausalLM", "BitNetConfig", LLAMA_SMALL, "partial-gradient"),
        # q, v and k in four groups, an order of its own.
        ("CodeGenForCausalLM", "CodeGenConfig", {**GPT2_SMALL, "rotary_dim": 8}, "heads-not-recognised"),
        # One key-value head.
        ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2_SMALL, "does-not-divide"),
    ],
)
def test_what_would_train_wrongly_stays_whole(model: str, config: str, options: dict[str, Any], code: str) -> None:
    analysis = MegatronPlanner({"tp": 2}).analyse(build(Family(model, config, {}), options))
    codes = {name: problem.code for name, problem in analysis.left_whole.items()}
    assert code in codes.values()
    assert not any("attn" in cut or "attention" in cut for cut in analysis.cuts)


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of transformers
@pytest.mark.parametrize("name", KEPT if os.environ.get("SHARD_SPEC_ALL") else ["gemma4", "lfm2"])
def test_newer_families_that_are_cut_in_part(name: str) -> None:
    """Layers that read the keys and values of others, convolutions between linears, gates, norms over all heads."""
    model, config, options, code = KEPT[name]
    torch.manual_seed(0)
    dtype = torch.float32 if options.get("num_experts") else torch.float64
    small = build(Family(model, config, {}), options).to(dtype).eval()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    planner = MegatronPlanner({"tp": 2})
    analysis = planner.analyse(small)
    assert code in {problem.code for problem in analysis.left_whole.values()}
    assert planner.build_plan(small).validate(small) == ()
    assert not any(("attn" in cut and name != "lfm2") or ".conv." in cut for cut in analysis.cuts)
    units = tuple(unit for unit in analysis.units if unit.rows and unit.columns)
    assert len(units) >= 2
    assert verify_units(small, units, 2, lambda twin: first_output(twin, "ids")) == ()
