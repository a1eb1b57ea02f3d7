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
from tp_styles.sources.auto import sharded_share

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


def code_of(*types: str) -> list[str]:
    """Modules with transformers' code of some model types, for `tp_models.preload`."""
    return [f"transformers.models.{name}.modeling_{name}" for name in ("auto", *types)]


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


def build(family: str) -> nn.Module:
    """A tiny model with random weights, in float64, ready to train."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
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

    makers = [auto.from_config for auto in (AutoModelForCausalLM, AutoModel) if kind in auto._model_mapping]
    path = kind.__module__.replace("configuration_", "modeling_")
    beside = vars(importlib.import_module(path)).values() if importlib.util.find_spec(path) else ()
    classes: list[Any] = [each for each in beside if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    return makers + [
        each for each in classes if each.config_class is kind and not each.__name__.endswith("PreTrainedModel")
    ]


SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    "vocab_size": 128,
}
"""Small values of what configurations of causal models call their sizes."""

LAYERS = "num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers"
HEADS = "head_dim", "rotary_dim", "kv_channels", "attention_head_size", "qk_rope_head_dim", "qk_nope_head_dim"


def causal_types() -> list[str]:
    """All types of causal models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(name: str) -> nn.Module:
    """A small causal model of a type, in float64, trained on fixed ids.

    Raises:
        Exception: It does not build so small, or does not run, whatever its code raises.
    """
    error: Exception | None = None
    # Some numbers of layers or heads go with lists of other defaults.
    for omitted in ((), HEADS, LAYERS, (*HEADS, *LAYERS)):
        for more in ({}, {**SMALL, **FAMILIES[name]}) if name in FAMILIES else ({},):
            try:
                return _small(name, {key: value for key, value in SIZES.items() if key not in omitted}, more)
            except Exception as raised:
                error = error or raised
    assert error is not None
    raise error


def _small(name: str, sizes: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    defaults = vars(AutoConfig.for_model(name))  # no aliases, no properties
    options = {key: value for key, value in sizes.items() if isinstance(defaults.get(key), int)}
    config = AutoConfig.for_model(name, **{**options, **more})
    nested = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for one in nested:  # of the text and of towers beside it
        for key, value in sizes.items():
            if isinstance(vars(one).get(key), int):
                setattr(one, key, value)
    for one in (config, *nested):
        one._attn_implementation = one._experts_implementation = "eager"  # torch's grouped product takes no float64
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if sum(p.numel() for p in model.parameters()) > 20_000_000:
        raise ValueError("it is large for all small sizes")
    torch.manual_seed(0)
    built: nn.Module = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():  # some keep their last state, which could not be copied with a graph
        loss_of(built)
    return built


def loss_of(model: Any) -> torch.Tensor:
    """The loss of a causal model on fixed ids."""
    words = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(1, min(127, words), (2, 12), generator=torch.Generator().manual_seed(5))
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def check_type(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Share of a type's parameters that `auto_plan` shards, and its outcome on the mesh beside one process.

    Args:
        name: Model type.
        mesh: 1-D mesh.

    Returns:
        Share and outcome: `"right"`, `"refused: code"`, `"wrong: ..."`, `"failed: ..."`; `"no model: ..."` where
        transformers builds or runs none so small.
    """
    try:
        model = small(name)
        alone = copy.deepcopy(model)
    except Exception as error:
        return {"share": None, "outcome": f"no model: {type(error).__name__}: {_line(error)}"}
    share = None
    try:
        styles = tp.auto_plan(model, tp_size=mesh.size())
        share = sharded_share(model, tp.plan_styles(model, styles, mesh.size()))[0]
        tp.apply_plan(model, mesh, styles)
        results = []
        for one in (model, alone):
            for _ in range(2):  # the second with the weights of a step
                one.zero_grad()
                loss = loss_of(one)
                loss.backward()
                with torch.no_grad():
                    for parameter in one.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.05)
            results.append(float(loss.detach()))
        state, expected = tp.full_state_dict(model), alone.state_dict()
    except tp.PlanError as error:
        return {"share": share, "outcome": f"refused: {error.problems[0].code if error.problems else _line(error)}"}
    except Exception as error:
        return {"share": share, "outcome": f"failed: {type(error).__name__}: {_line(error)}"}
    errors = {"loss": abs(results[0] - results[1]) / abs(results[1])}
    for key, value in expected.items():
        if value.is_floating_point():
            errors[key] = float((state[key] - value).abs().max() / value.abs().max().clamp_min(1e-3))
    worst = max(errors, key=lambda key: errors[key])
    # Routers, norms and rotary embeddings compute in float32 whatever they get; a mistake of a plan is off by far more.
    outcome = "right" if errors[worst] < 1e-4 else f"wrong: {worst} off by {errors[worst]:.1e}"
    return {"share": share, "outcome": outcome}


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100]


def check_by(family: str, mesh: DeviceMesh, way: str, steps: int = 5) -> dict[str, Any]:
    """Logits, all gradients, greedy generation, and parameters after some steps, by one kind of plan.

    Args:
        family: Model type.
        mesh: 1-D mesh.
        way: `"auto_plan"`, or `"module"` for the model's own plan and nothing else.
        steps: Steps of SGD.

    Returns:
        The share of matmul-weight bytes that are divided, and patterns of those that are not.
    """
    model = build(family)
    alone = copy.deepcopy(model)
    if way == "auto_plan":
        styles = tp.auto_plan(model, tp_size=mesh.size())
    else:
        styles = tp.from_hf_tp_plan(model)
    handle = tp.apply_plan(model, mesh, styles)
    ids = torch.randint(3, 48, (2, 7), generator=torch.Generator().manual_seed(1))
    out, expected = model(input_ids=ids, labels=ids), alone(input_ids=ids, labels=ids)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-9, rtol=0)
    out.loss.backward()
    expected.loss.backward()
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
    share, replicated = divided(alone, handle.plan)
    return {"share": share, "left": replicated}


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
    replicated = {re.sub(r"\.\d+\.", ".*.", name) for name in weights if name not in parts}
    return sum(size for name, size in weights.items() if name in parts) / sum(weights.values()), sorted(replicated)
