"""Models from a factory, a Hugging Face config or a safetensors header; always on meta."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_spec._shared.dtypes import SAFETENSORS
from shard_spec._shared.page import human_bytes
from shard_spec.cli.presets import PRESETS
from shard_spec.cli.usage import UsageError
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.untrusted_input import MAX_BYTES, json_values

if TYPE_CHECKING:
    from torch import nn


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
    if source.lower() in PRESETS and not path.exists():
        return _from_settings(source, PRESETS[source.lower()], dequantize)
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
        names = f"and no name of a model ({', '.join(PRESETS)})"
        raise UsageError(f"{source!r} is no MODULE:FACTORY, no config.json, no .safetensors file {names}")
    import torch
    from torch import nn

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
    import torch

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
    makers = [maker for cls in named if (maker := getattr(cls, "_from_config", None)) is not None]
    makers += [transformers.AutoModelForCausalLM.from_config, transformers.AutoModel.from_config]
    failure: Exception | None = None
    for make in makers:
        try:
            with torch.device("meta"):
                model: nn.Module = make(config)
            break
        except Exception as error:  # as above
            failure = error  # the last one is reported
    else:
        text = f"{type(failure).__name__}: {failure!s:.300}"
        raise UsageError(f"{path}: transformers has no model for it: {text}")
    quantization = settings.get("quantization_config")
    if isinstance(quantization, dict) and not (dequantize or quantization.get("dequantize")):
        from shard_spec.cli.quantized import store_quantized  # imports torch

        store_quantized(path, model, quantization)
    return model


def _refuse_giants(path: Path | str, settings: Any, depth: int = 0) -> None:
    """Refuse configs of too many modules: they are built one by one, on meta too."""
    if depth > _MAX_DEPTH:  # before Python's recursion limit
        raise UsageError(f"{path} is nested deeper than {_MAX_DEPTH}")
    items = settings.items() if isinstance(settings, dict) else enumerate(settings)
    for key, value in items:
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
        trains = plain and not (of_packed and kinds.get(of_packed[1], ("",))[0].startswith(("F8", "U8", "I8")))
        tensors.append(TensorMetadata(name, shape, dtype, requires_grad=trains))
    return tensors


def read_text(path: Path) -> str:
    """Read an untrusted UTF-8 file of bounded length."""
    try:
        with path.open("rb") as file:
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
