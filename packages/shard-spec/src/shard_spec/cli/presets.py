"""Published configs of common models, by name: what shapes and counts of parameters depend on."""

from __future__ import annotations

from typing import Any

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "dtype": "bfloat16"}
_QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "dtype": "bfloat16"}
_QWEN_MOE = {**_QWEN, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
_MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "dtype": "bfloat16",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "dtype": "bfloat16",
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
_PLAIN = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_OSS |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": list(_PLAIN)}}
_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _sizes(hidden: int, between: int, layers: int, heads: int, key_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": between, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, **more}


_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 8, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA | _sizes(2048, 8192, 16, 32, 8, head_dim=64, **_TIED),
    "llama-3.2-3b": _LLAMA | _sizes(3072, 8192, 28, 24, 8, head_dim=128, **_TIED),
    "llama-3.1-8b": _LLAMA | _sizes(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _LLAMA | _sizes(8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _LLAMA | _sizes(16384, 53248, 126, 128, 8),
    "qwen3-0.6b": _QWEN | _sizes(1024, 3072, 28, 16, 8, head_dim=128, **_TIED),
    "qwen3-8b": _QWEN | _sizes(4096, 12288, 36, 32, 8, head_dim=128),
    "qwen3-32b": _QWEN | _sizes(5120, 25600, 64, 64, 8, head_dim=128),
    "qwen3-30b-a3b": _QWEN_MOE | _sizes(2048, 6144, 48, 32, 4, moe_intermediate_size=768, **_EXPERTS),
    "qwen3-235b-a22b": _QWEN_MOE | _sizes(4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **_EXPERTS),
    "mixtral-8x7b": _MIXTRAL | _sizes(4096, 14336, 32, 32, 8),
    "mixtral-8x22b": _MIXTRAL | _sizes(6144, 16384, 56, 48, 8),
    "deepseek-v3": _V3 | _sizes(7168, 18432, 61, 128, 128),
    "gpt-oss-20b": _OSS | _sizes(2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32),
    "gpt-oss-120b": _OSS | _sizes(2880, 2880, 36, 64, 8, head_dim=64, num_local_experts=128),
}
