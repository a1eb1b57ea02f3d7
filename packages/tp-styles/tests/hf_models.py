"""Tiny random models of many families, and the comparison of each with itself unsharded."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch
import tp_models as models
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tp_styles.runtime.redistribute import TPGroup

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}

# model type -> what its configuration needs beyond SMALL
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "phi": {},
    "phi3": {},
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "glm": {},
    "glm4": {},
    "helium": {},
    "smollm3": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "nemotron": {},
    "gpt_neox": {},
    "exaone4": {"sliding_window": 16},
    "apertus": {},
    "arcee": {},
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 16},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "deepseek_v2": {**EXPERTS, **LATENT},
    "glm4_moe_lite": {**EXPERTS, **LATENT},
    "glm4_moe": EXPERTS,
    "ernie4_5_moe": EXPERTS,
    "dots1": EXPERTS,
}


ENCODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def encoders() -> list[tuple[str, Callable[[], nn.Module], dict[str, torch.Tensor]]]:
    """Encoders, encoder-decoders and vision models: name, maker and inputs."""
    import transformers as of

    tower = {key: value for key, value in ENCODER.items() if key != "vocab_size"}
    small = {"image_size": 16, "patch_size": 4}
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    layers = {
        f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4))
    }
    both = {"vocab_size": 96, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **layers}
    both |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sound = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    clip = {"text_config": {**ENCODER, "eos_token_id": 17}, "vision_config": {**tower, **small}, "projection_dim": 16}
    ids = {"input_ids": torch.arange(2, 18).view(2, 8)}
    decoder = {"decoder_input_ids": ids["input_ids"]}
    pixels = {"pixel_values": torch.linspace(-1, 1, 768).view(1, 3, 16, 16)}
    heard = {"input_features": torch.linspace(-1, 1, 512).view(2, 8, 32), **decoder}
    return [
        ("encoder: T5", lambda: of.T5EncoderModel(of.T5Config(**t5)), ids),
        (
            "encoder-decoder: T5",
            lambda: of.T5ForConditionalGeneration(of.T5Config(**t5, use_cache=False)),
            {**ids, **decoder},
        ),
        (
            "vision: BEiT",
            lambda: of.BeitModel(of.BeitConfig(**ENCODER, **small, use_relative_position_bias=True)),
            pixels,
        ),
        ("encoder: BERT", lambda: of.BertForMaskedLM(of.BertConfig(**ENCODER)), ids),
        (
            "encoder: RoBERTa",
            lambda: of.RobertaForMaskedLM(of.RobertaConfig(**ENCODER, max_position_embeddings=64)),
            ids,
        ),
        ("vision: ViT", lambda: of.ViTModel(of.ViTConfig(**tower, **small)), pixels),
        ("vision and text: CLIP", lambda: of.CLIPModel(of.CLIPConfig(**clip)), {**ids, **pixels}),
        ("encoder-decoder: BART", lambda: of.BartModel(of.BartConfig(**both, max_position_embeddings=64)), ids),
        ("speech: Whisper", lambda: of.WhisperModel(of.WhisperConfig(**both, **sound)), heard),
    ]


def build(family: str, experts: str = "eager") -> nn.Module:
    """A tiny model with random weights, in float64, ready to train."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    model: nn.Module = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():  # norms and biases too: a wrong one would not be seen
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def on_meta(key: str, kind: Any) -> nn.Module | None:
    """A model with a tensor-parallel plan on the meta device; None where transformers builds none from defaults.

    Args:
        key: Model type.
        kind: Class of its configuration.
    """
    for sizes in ({}, {**SMALL, **FAMILIES.get(key, {})}):
        for short in (True, False):  # some defaults have layers of which later ones need the first
            for build_class in _model_classes(kind):
                try:
                    with torch.device("meta"):
                        model: nn.Module = build_class(_first_layers(kind(**sizes)) if short else kind(**sizes))
                except Exception:  # whatever transformers' code raises on defaults that do not fit
                    continue
                if getattr(model, "tp_plan", None):
                    return model
    return None


def _first_layers(config: Any) -> Any:
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        count = getattr(part, "num_hidden_layers", None)
        if isinstance(count, int) and count > 2:
            part.num_hidden_layers = 2
            for name, value in list(vars(part).items()):
                if isinstance(value, list) and len(value) == count:
                    setattr(part, name, value[:1] + value[-1:])  # experts often begin after some layers
            if getattr(part, "first_k_dense_replace", None):
                part.first_k_dense_replace = 1
    return config


def _model_classes(kind: Any) -> list[Any]:
    """Makers of models from a configuration, causal models first: those of Auto, then the classes beside it."""
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

    found = [auto.from_config for auto in (AutoModelForCausalLM, AutoModel) if kind in auto._model_mapping]
    path = kind.__module__.replace("configuration_", "modeling_")
    beside = vars(importlib.import_module(path)).values() if importlib.util.find_spec(path) else ()
    classes: list[Any] = [each for each in beside if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    return found + [
        each for each in classes if each.config_class is kind and not each.__name__.endswith("PreTrainedModel")
    ]


def check_by(family: str, mesh: DeviceMesh, way: str, steps: int = 5, experts: str = "eager") -> dict[str, Any]:
    """Logits, all gradients, greedy generation, and parameters after some steps, by one kind of plan.

    Args:
        family: Model type.
        mesh: 1-D mesh.
        way: `"auto_plan"`, `"module"` for the model's own plan and nothing else, or `"experts"` for that with its
            expert-parallel plan.
        steps: Steps of SGD.
        experts: How transformers computes experts.

    Returns:
        The share of matmul-weight bytes that are divided, and patterns of those that are not.
    """
    model = build(family, experts)
    alone = copy.deepcopy(model)
    if way == "auto_plan":
        styles = tp.auto_plan(model, tp_size=mesh.size())
    else:
        styles = tp.from_hf_tp_plan(model, ep_implementation="all_reduce" if way == "experts" else None)
    handle = tp.apply_plan(model, mesh, styles)
    ids = torch.randint(3, 48, (2, 7), generator=torch.Generator().manual_seed(1))
    found, wanted = model(input_ids=ids, labels=ids), alone(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-9, rtol=0)
    found.loss.backward()
    wanted.loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    own = models.full_gradients(model, mesh)
    own = {name: value for name, value in own.items() if name in gradients or value.abs().sum() > 0}
    missing = [name for name in gradients if name not in own and gradients[name].abs().sum() > 0]
    assert not missing, missing
    models.assert_close(own, {name: gradients[name] for name in own}, atol=1e-7)  # routers compute in float32
    with torch.no_grad():
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **options), alone.generate(ids, **options))  # type: ignore[operator]
    if steps:
        losses = [_train(m, ids, steps) for m in (model, alone)]
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=1e-6, rtol=0)
        axis = TPGroup(mesh)
        state = {name: models.whole_parameter(p, axis) for name, p in model.named_parameters()}
        models.assert_close(state, {name: p.detach() for name, p in alone.named_parameters()}, atol=1e-6)
    share, left = divided(alone, handle.plan)
    return {"share": share, "left": left}


def _train(model: nn.Module, ids: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def divided(model: nn.Module, plan: tp.TPPlan) -> tuple[float, list[str]]:
    """The share of bytes of matmul weights (two dims or more, no lookups) that are divided, and the others' names."""
    parts = {
        module.info.where(name)
        for module in plan.modules
        for name, parameter in module.spec.parameters
        if not parameter.split.is_replicated
    }
    lookups = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    weights = {
        name: parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.dim() > 1 and name not in lookups
    }
    whole = {re.sub(r"\.\d+\.", ".*.", name) for name in weights if name not in parts}
    return sum(size for name, size in weights.items() if name in parts) / sum(weights.values()), sorted(whole)
