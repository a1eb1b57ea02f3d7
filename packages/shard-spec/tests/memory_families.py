"""Predicted bytes of a training step beside those of a real one, for model families of transformers on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shard_spec import ShardingPlan
from torch.autograd.graph import saved_tensors_hooks

PARTS = ("parameters", "gradients", "optimizer", "activations")
_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
_GATED = {**_SMALL, "intermediate_size": 160, "num_key_value_heads": 2, "max_position_embeddings": 128}


@dataclass(frozen=True)
class Family:
    """One family: its class in transformers, a small config, and what a rank passes to forward."""

    name: str
    model: str
    config: str
    options: Mapping[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]

    def make(self) -> torch.nn.Module:
        """Return the model in training mode, with random weights."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model: torch.nn.Module = getattr(transformers, self.model)(config).train()
        return model


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * 48).view(2, 48) % 512}


def both() -> dict[str, torch.Tensor]:
    return {**tokens(), "decoder_input_ids": tokens()["input_ids"][:, :16]}


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.linspace(0, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}


def speech() -> dict[str, torch.Tensor]:
    features = torch.linspace(0, 1, 2 * 16 * 60).view(2, 16, 60)
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"][:, :16]}


def image_and_text() -> dict[str, torch.Tensor]:
    return {**image(), **tokens()}


_VISION = {**_SMALL, "intermediate_size": 160, "image_size": 32, "patch_size": 8}
_CLIP = {key: value for key, value in _VISION.items() if key != "vocab_size"}
_WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "vocab_size": 512,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")},
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_heads": 4, "vocab_size": 512}
_CLIP_TEXT = {**_SMALL, "intermediate_size": 160, "max_position_embeddings": 64}
_STATE_SPACE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "state_size": 8}
_BART = {
    "d_model": 64,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 160 for part in ("encoder", "decoder")},
}
_DEBERTA = {
    **_SMALL,
    "intermediate_size": 160,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "max_position_embeddings": 64,
    **{f"{part}_dropout_prob": 0.0 for part in ("hidden", "attention_probs")},
}
_EXPERTS = {**_GATED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = (
    Family("Llama", "LlamaForCausalLM", "LlamaConfig", _GATED, tokens),
    Family("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_GATED, "head_dim": 16}, tokens),
    Family("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", {**_GATED, "head_dim": 16}, tokens),
    Family("Mixtral", "MixtralForCausalLM", "MixtralConfig", {**_GATED, "num_local_experts": 4}, tokens),
    Family(
        "GPT-2", "GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512}, tokens
    ),
    Family("BERT", "BertForMaskedLM", "BertConfig", {**_SMALL, "intermediate_size": 160}, tokens),
    Family("T5", "T5ForConditionalGeneration", "T5Config", _T5, both),
    Family("ViT", "ViTForImageClassification", "ViTConfig", _VISION, image),
    Family("CLIP", "CLIPModel", "CLIPConfig", {"text_config": _CLIP_TEXT, "vision_config": _CLIP}, image_and_text),
    Family("Whisper", "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, speech),
    Family("Mamba", "MambaForCausalLM", "MambaConfig", _STATE_SPACE, tokens),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS, tokens),
    Family("BART", "BartForConditionalGeneration", "BartConfig", _BART, both),
    Family("DeBERTa-v2", "DebertaV2ForMaskedLM", "DebertaV2Config", _DEBERTA, tokens),
    Family("Falcon", "FalconForCausalLM", "FalconConfig", {**_SMALL, "num_hidden_layers": 2}, tokens),
)


def predicted(family: Family) -> dict[str, int]:
    """Bytes by part, from shapes alone."""
    plan, model = ShardingPlan({}, mesh={"dp": 1}), family.make()
    state = plan.memory(model, optimizer="adamw").on(0)
    return {**{part: state[part] for part in PARTS[:3]}, PARTS[3]: plan.activations(model, family.inputs()).local_bytes}


def measured(family: Family) -> dict[str, int]:
    """Bytes by part of one real forward, backward and step of AdamW."""
    model = family.make()
    parameters = list(model.parameters())
    own = {each.untyped_storage().data_ptr() for each in [*parameters, *model.buffers()]}
    memory: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory[tensor.untyped_storage().data_ptr()] = tensor  # holds it: an address is reused once its memory is freed
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**family.inputs())
    saved = sum(tensor.untyped_storage().nbytes() for at, tensor in memory.items() if at not in own)
    loss = sum(
        value.float().sum() for value in output.values() if isinstance(value, torch.Tensor) and value.requires_grad
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    gradients = [each.grad for each in parameters if each.grad is not None]
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in (parameters, gradients, state)]
    return dict(zip(PARTS, [*sizes, saved], strict=True))
