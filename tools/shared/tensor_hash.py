"""A hash of a tensor's bits: ranks compare 16 bytes in place of the values.

Equal values give equal hashes on any device and in any strides. A NaN counts by its payload, and -0.0 differs from 0.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

from .consensus import as_bytes

K = TypeVar("K", bound=Hashable)

_CHUNK = 1 << 17  # 64-bit words that are mixed at a time: 1 MiB stays in a core's cache
_ODD, _FACTOR = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D  # odd, so that products lose no bit


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return two int64 numbers, on the tensor's device, that depend on each bit and its place.

    Two tensors that differ in one word of 8 bytes always have different hashes: each step below is a bijection of that
    word. Any other two collide by chance, as with 128 random bits. Shape and dtype do not count, the number of bytes
    does: compare them beside the hash.
    """
    data = as_bytes(tensor)
    total = torch.full((2,), data.numel(), dtype=torch.int64, device=data.device)
    keys = (torch.arange(min(_CHUNK, -(-data.numel() // 8)), device=data.device) * 2 + 1) * _ODD
    for part in torch.split(data, 8 * _CHUNK):
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))  # a copy, aligned
        words = part.view(torch.int64)
        key = keys[: words.numel()]
        mixed = words + key
        low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
        low ^= high  # the highest bits (signs) reach the product too
        mixed *= _FACTOR
        low ^= high
        total = total * _FACTOR + torch.stack([mixed.sum(), mixed.mul_(key).sum()])
    return total


def tensor_hashes(tensors: Mapping[K, torch.Tensor]) -> dict[K, tuple[int, int]]:
    """Return the hash of each tensor, by one transfer from each device."""
    rows = {key: tensor_hash(tensor) for key, tensor in tensors.items()}
    hashes: dict[K, tuple[int, int]] = {}
    for device in {row.device for row in rows.values()}:
        here = {key: row for key, row in rows.items() if row.device == device}
        values = torch.stack(list(here.values())).tolist()
        hashes.update({key: (first, second) for key, (first, second) in zip(here, values, strict=True)})
    return {key: hashes[key] for key in rows}
