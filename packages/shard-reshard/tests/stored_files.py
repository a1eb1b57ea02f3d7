"""Safetensors files made without the library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from shard_reshard._shared.dtypes import SAFETENSORS

WORDS = {name: word for word, name in SAFETENSORS.items()}


def file_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What the format's own library writes, up to the order of tensors."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        word = WORDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": word, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A file of these tensors."""
    path.write_bytes(file_bytes(tensors))
    return path
