"""Which tensors share bytes: exact for every stride, and cheap where their memory plainly lies apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from shard_reshard._torch_compat import is_fake


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins; of a fake one, which lies nowhere, a number of its own."""
    return id(tensor) if is_fake((tensor,)) else tensor.data_ptr()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor have one place, as in expanded tensors and sliding windows."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if not tensor.numel() or not dims:
        return False
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False  # every step leads out of what the smaller steps reach
    if dims[0][0] == 0:
        return True
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    places = places.reshape(-1).sort().values
    return bool((places[1:] == places[:-1]).any())


def sharing(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> list[tuple[int, int]]:
    """The pairs of tensors that have bytes in common: two of ``tensors``, or one of them and one of ``others``.

    Pairs of positions, the smaller one first; ``others`` are counted after ``tensors``.
    """
    everything = [*tensors, *others]
    spans = sorted(
        (tensor.data_ptr(), _end(tensor), str(tensor.device), at)
        for at, tensor in enumerate(everything)
        if tensor.numel()
    )
    found: list[tuple[int, int]] = []
    reaching: list[tuple[int, int, str, int]] = []
    for span in spans:
        reaching = [other for other in reaching if other[1] > span[0]]
        for other in reaching:
            first, second = sorted((other[3], span[3]))
            asked = first < len(tensors) and other[2] == span[2]
            if asked and _have_common_bytes(everything[first], everything[second]):
                found.append((first, second))
        reaching.append(span)
    return sorted(found)


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans of memory meet have a byte in common, not only gaps of each other."""
    begin, end = min(one.data_ptr(), other.data_ptr()), max(_end(one), _end(other))
    grain = gcd(one.element_size(), other.element_size(), abs(one.data_ptr() - other.data_ptr()))
    taken = torch.zeros((end - begin) // grain, dtype=torch.bool)
    _places(taken, one, begin, grain).fill_(True)
    return bool(_places(taken, other, begin, grain).any())


def _places(memory: torch.Tensor, tensor: torch.Tensor, begin: int, grain: int) -> torch.Tensor:
    """The places of a tensor's bytes in ``memory``, which has an element for each ``grain`` bytes."""
    width = tensor.element_size() // grain
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    sizes, strides = [size for size, _ in dims], [stride * width for _, stride in dims]
    return memory.as_strided((*sizes, width), (*strides, 1), (tensor.data_ptr() - begin) // grain)
