"""Bytes of quantised weights, from the ``quantization_config`` of a Hugging Face config.

The model on meta keeps its plain weights, whose names and shapes a plan is about. Each quantised weight carries the
bytes that the checkpoint stores for it, packed values and scales together; `metadata_of` reads them. It is frozen: no
optimizer updates packed values.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn

from shard_spec.cli.usage import UsageError

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
            if method == "mxfp4" and parameter.dim() == 3:
                stored = _mxfp4_bytes(tuple(parameter.shape))
            elif method == "fp8" and parameter.dim() == (2 if isinstance(module, nn.Linear) else 3):
                scale = 1 if settings.get("scale_fmt") == "ue8m0" else 4
                stored = _fp8_bytes(tuple(parameter.shape), block, scale)
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


def _mxfp4_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of experts of shape (experts, in, out): two values a byte, and a scale byte for 32 of ``in``."""
    experts, inputs, outputs = shape
    return experts * outputs * (-(-inputs // 2) + -(-inputs // 32))


def _fp8_bytes(shape: tuple[int, ...], block: list[int] | None, scale: int) -> int:
    """Return the bytes of a weight of shape (..., out, in): ``scale`` more for each block or matrix."""
    *stacked, rows, columns = shape
    blocks = 1 if block is None else -(-rows // block[0]) * -(-columns // block[1])
    return prod(shape) + prod(stacked) * blocks * scale
