"""Models that the command line names, and arguments that several commands share.

Models come from a factory, a Hugging Face config or a safetensors header, always on meta. Of common models the
published configs stand here by name: what shapes and counts of parameters depend on.

Bytes of quantised weights follow from the ``quantization_config`` of a Hugging Face config. The model on meta keeps its
plain weights, whose names and shapes a plan is about. Each quantised weight carries the bytes that the checkpoint
stores for it, packed values and scales together; `metadata_of` reads them. It is frozen: no optimizer updates packed
values.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shard_spec._shared.dtypes import SAFETENSORS
from shard_spec._shared.page import human_bytes
from shard_spec.cli.usage import UsageError
from shard_spec.estimate.communication import PRESETS, Topology, topology_preset
from shard_spec.formatting import bytes_of
from shard_spec.plan.content import MAX_BYTES, json_values
from shard_spec.plan.resolve import ModelMetadata, TensorMetadata

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
_PLAIN_OF_OSS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_OSS |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": list(_PLAIN_OF_OSS)}}
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


_PLAIN = "count the weights as plain ones with --dequantize, as they are in training"


def store_quantized(path: Any, model: nn.Module, settings: dict[str, Any]) -> None:
    """Mark the quantised weights of ``model`` with their stored bytes, and freeze them.

    Args:
        path: The config, for errors.
        model: The plain model, on meta.
        settings: Its ``quantization_config``: MXFP4 experts (GPT-OSS), or block-scaled float8 (DeepSeek-V3, Qwen3).

    Raises:
        UsageError: For another method, or when no weight matches: plain bytes would be a wrong number in silence.
    """
    method = settings.get("quant_method")
    if method not in ("mxfp4", "fp8"):
        raise UsageError(f"{path}: quantization_config names the method {method!r}, whose bytes are unknown; {_PLAIN}")
    block: Any = settings.get("weight_block_size")
    of_two = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    if method == "fp8" and block is not None and not of_two:
        raise UsageError(f"{path}: weight_block_size is {str(block)[:60]}, not two numbers; {_PLAIN}")
    count = 0
    for module in _converted(path, model, settings):
        for parameter in module.parameters(recurse=False):
            *stacked, rows, columns = parameter.shape if parameter.dim() > 1 else (0, 0)
            if method == "mxfp4" and parameter.dim() == 3:  # (experts, in, out): two values a byte, a scale for 32
                stored = stacked[0] * columns * (-(-rows // 2) + -(-rows // 32))
            elif method == "fp8" and parameter.dim() == (2 if isinstance(module, nn.Linear) else 3):
                # (..., out, in): a scale of one byte or four for each block, or for each matrix.
                blocks = 1 if block is None else -(-rows // block[0]) * -(-columns // block[1])
                scale = 1 if settings.get("scale_fmt") == "ue8m0" else 4
                stored = parameter.numel() + prod(stacked) * blocks * scale
            else:
                continue  # a bias stays plain
            parameter.requires_grad_(False)
            parameter.stored_bytes = stored  # type: ignore[attr-defined]  # read by metadata_of
            count += 1
    if not count:
        raise UsageError(f"{path}: quantization_config ({method}) matches no weight of this model; {_PLAIN}")


def _converted(path: Any, model: nn.Module, settings: dict[str, Any]) -> list[nn.Module]:
    """Return the modules whose weights transformers would load as quantised ones."""
    try:
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError as error:  # an older or newer transformers
        raise UsageError(f"{path}: this transformers has no list of quantised weights ({error}); {_PLAIN}") from None
    skipped = settings.get("modules_to_not_convert")
    if skipped is not None and not (isinstance(skipped, list) and all(isinstance(each, str) for each in skipped)):
        raise UsageError(f"{path}: modules_to_not_convert is no list of names")
    full = HfQuantizer.get_modules_to_not_convert(model, skipped, getattr(model, "_keep_in_fp32_modules", None))
    of_experts = settings["quant_method"] == "mxfp4"
    return [
        module
        for name, module in model.named_modules()
        if (name.endswith(".experts") or (type(module) is nn.Linear and not of_experts))
        and should_convert_module(name, full)
    ]


_MAX_NUMEL = 1 << 58  # bytes fit in int64 for any dtype
_MAX_NUMBER, _MAX_MODULES, _MAX_DEPTH = 1 << 40, 4096, 12


def load_model(source: str, *, dequantize: bool = False) -> nn.Module | ModelMetadata:
    """Load the model called ``source``.

    Args:
        source: As the command line names it.
        dequantize: Ignore the ``quantization_config`` of a Hugging Face config: weights are plain.

    Raises:
        UsageError: If it does not exist, with the valid forms.
    """
    path = Path(source)
    if source.lower() in MODELS and not path.exists():
        return _from_settings(source, MODELS[source.lower()], dequantize)
    if path.is_dir():
        for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
            if (path / name).is_file():
                return load_model(str(path / name), dequantize=dequantize)
        raise UsageError(f"the folder {source} holds neither config.json nor model.safetensors")
    if source.endswith(".safetensors.index.json"):
        return _from_index(path)
    if path.suffix == ".safetensors":
        return ModelMetadata(tuple(_header(path)))
    if path.suffix == ".json":
        return _from_settings(path, _read_json(path), dequantize)  # bounded, no duplicate keys
    if ":" not in source:
        names = f"and no name of a model ({', '.join(MODELS)})"
        raise UsageError(f"{source!r} is no MODULE:FACTORY, no config.json, no .safetensors file {names}")
    module_name, _, attribute = source.rpartition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except Exception as error:  # import runs the module's own code
        raise UsageError(f"cannot import {source!r}: {error}") from None
    if not callable(factory):
        raise UsageError(f"{source!r} is no function or class that makes a model")
    try:
        with torch.device("meta"):  # no memory for weights
            model = factory()
    except Exception as error:  # the factory is the user's code
        raise UsageError(f"{source!r}, called without arguments, raised {type(error).__name__}: {error}") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source!r} made a {type(model).__qualname__}, not an nn.Module")
    return model


def _from_settings(path: Path | str, settings: Any, dequantize: bool) -> nn.Module:
    """Return the model of a Hugging Face config; ``path`` names it in errors."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise UsageError("reading a Hugging Face config needs transformers: pip install transformers") from None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise UsageError(f"{path} is no Hugging Face config: it has no 'model_type'")
    settings = {key: value for key, value in settings.items() if key not in ("model_type", "auto_map")}
    _refuse_giants(path, settings)
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:  # untrusted: transformers checks some fields by use
        raise UsageError(f"{path}: transformers cannot read it: {type(error).__name__}: {error!s:.300}") from None
    architectures = settings.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    named = [getattr(transformers, name, None) for name in names]
    makers = [
        *(maker for cls in named if (maker := getattr(cls, "_from_config", None)) is not None),
        transformers.AutoModelForCausalLM.from_config,
        transformers.AutoModel.from_config,
    ]
    failure: Exception | None = None
    for make in makers:
        try:
            with torch.device("meta"):
                model: nn.Module = make(config)
            break
        except Exception as error:  # as above
            failure = error  # the last one is reported
    else:
        raise UsageError(f"{path}: transformers has no model for it: {type(failure).__name__}: {failure!s:.300}")
    quantization = settings.get("quantization_config")
    if isinstance(quantization, dict) and not (dequantize or quantization.get("dequantize")):
        store_quantized(path, model, quantization)
    return model


def _refuse_giants(path: Path | str, settings: Any, depth: int = 0) -> None:
    """Refuse configs of too many modules: they are built one by one, on meta too."""
    if depth > _MAX_DEPTH:  # before Python's recursion limit
        raise UsageError(f"{path} is nested deeper than {_MAX_DEPTH}")
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        if isinstance(value, dict | list):
            _refuse_giants(path, value, depth + 1)
        elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise UsageError(f"{path}: {key} is {str(value)[:30]}; the largest number that is read is {_MAX_NUMBER}")
        elif isinstance(value, int) and value > _MAX_MODULES and re.search("layers|experts|depth|blocks", str(key)):
            raise UsageError(f"{path}: {key} is {value}; models of up to {_MAX_MODULES} layers are built")


def _from_index(path: Path) -> ModelMetadata:
    index = _read_json(path)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise UsageError(f"{path} is no safetensors index: it has no 'weight_map'")
    headers: dict[str, dict[str, TensorMetadata]] = {}
    for name in sorted(set(map(str, files.values()))):
        if Path(name).name != name or Path(name).suffix != ".safetensors":
            raise UsageError(f"{path} names {name[:200]!r}, which is no .safetensors file beside it")
        headers[name] = {tensor.name: tensor for tensor in _header(path.parent / name)}
    missing = [name for name, file in files.items() if name not in headers[file]]
    if missing:
        raise UsageError(f"{path} says that {files[missing[0]]} holds {missing[0][:200]!r}, and it does not")
    # A file may hold more tensors than the index takes from it.
    return ModelMetadata(tuple(headers[file][name] for name, file in files.items()))


def _header(path: Path) -> list[TensorMetadata]:
    """Read names, shapes and dtypes of a safetensors file, in its order, without its weights."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise UsageError("reading a safetensors file needs safetensors: pip install safetensors") from None
    if not path.is_file():  # opening a pipe would block
        raise UsageError(f"there is no file {path}")
    try:
        with path.open("rb") as file:  # the library accepts duplicate names, json_values refuses them
            json_values(file.read(min(int.from_bytes(file.read(8), "little"), MAX_BYTES)))
        with safe_open(path, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.offset_keys()}
            kinds = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{path} is no safetensors file: {error!s:.300}") from None
    tensors = []
    for name, (kind, shape) in kinds.items():
        if kind not in SAFETENSORS:
            raise UsageError(f"{path}: tensor {name[:200]!r} is of dtype {kind}, which torch cannot hold")
        if math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:  # 0 sizes do not hide huge ones
            raise UsageError(f"{path}: tensor {name[:200]!r} has more elements than torch can count")
        dtype = SAFETENSORS[kind]
        # Packed values have no gradient, and neither have the scales stored beside them.
        plain = dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")
        of_packed = re.fullmatch(r"(.*)_(scale|scale_inv|activation_scale|input_scale)", name)
        tensors.append(
            TensorMetadata(
                name,
                shape,
                dtype,
                requires_grad=plain
                and not (of_packed and kinds.get(of_packed[1], ("",))[0].startswith(("F8", "U8", "I8"))),
            )
        )
    return tensors


def read_text(path: Path | str) -> str:
    """Read an untrusted UTF-8 file of bounded length."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # one byte more shows excess
        if len(data) > MAX_BYTES:  # read() stopped one byte later
            raise UsageError(f"{path} has more than {human_bytes(MAX_BYTES)}")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        return json_values(read_text(path), floats=True)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def data_axes_of(arguments: argparse.Namespace) -> list[str] | None:
    """Return the declared data axes; None: as planned, then by name."""
    return None if arguments.data_axes is None else [each.strip() for each in arguments.data_axes.split(",") if each]


def limit_of(arguments: argparse.Namespace) -> int | None:
    """Return the memory of a rank in bytes."""
    return None if arguments.memory_limit is None else bytes_of(arguments.memory_limit, "--memory-limit")


def batch_of(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return sequences and their length."""
    if arguments.batch is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", arguments.batch)
    if match is None:
        raise UsageError(f"--batch {arguments.batch!r}: write sequences x length, for example 512x8192")
    return int(match[1]), int(match[2])


def topology_of(arguments: argparse.Namespace) -> Topology | None:
    """Return the machine."""
    if not arguments.topology:
        return None
    if arguments.topology not in PRESETS:
        raise UsageError(f"--topology {arguments.topology!r}: one of {', '.join(sorted(PRESETS))}")
    return topology_preset(arguments.topology)


def step_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a step; those of no effect without a batch are refused."""
    options = ("checkpointing", False), ("loss", None), ("accumulate", 1)
    useless = [f"--{name}" for name, default in options if getattr(arguments, name) not in (default, "")]
    if arguments.batch is None and useless:
        raise UsageError(f"{useless[0]} has no effect without --batch, for example --batch 512x8192")
    return {
        "dtype": arguments.dtype,
        "checkpointing": arguments.checkpointing,
        "loss": None if arguments.loss == "none" else arguments.loss or "causal-lm",
        "data_axes": data_axes_of(arguments),
        "accumulate": arguments.accumulate,
    }


def optimizer_of(arguments: argparse.Namespace) -> Any:
    """Return the optimizer: a name, or a mapping from patterns of parameters to names."""
    pairs = [text.rpartition("=") for text in arguments.optimizer or ["adamw"]]
    if len(pairs) == 1 and not pairs[0][1]:
        return pairs[0][2]
    if not all(pattern and name for pattern, _, name in pairs):
        raise UsageError("--optimizer: one NAME, or PATTERN=NAME for each group, for example '**.weight=whole-muon'")
    return {pattern: name for pattern, _, name in pairs}
