"""Copies on CUDA in words of 16 bytes; the device of ranks without tensors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from shard_reshard import group
from shard_reshard._torch_compat import _in_words

DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def _region(draw: random.Random, sizes: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bytes as memory, and a region of these sizes in it: offset, strided or transposed."""
    room = [n + draw.choice([0, 3, 16]) for n in sizes]
    memory = torch.randint(0, 2, [*room[:-1], room[-1] * dtype.itemsize], dtype=torch.uint8)
    full = memory.view(dtype)
    for dim, n in enumerate(sizes):
        full = full.narrow(dim, draw.choice([0, full.shape[dim] - n]), n)
    return memory, full.transpose(0, -1) if len(set(sizes)) == 1 and draw.random() < 0.3 else full


def test_words_copy_the_same_bytes() -> None:
    draw, in_words, alone = random.Random(0), 0, 0
    for _ in range(600):
        dtype, sizes = draw.choice(DTYPES), [draw.choice([1, 5, 16, 32]) for _ in range(draw.choice([1, 2, 3]))]
        (memory, target), (_, source) = (_region(draw, sizes, dtype) for _ in range(2))
        want = memory.clone()
        where = target.storage_offset()
        want.view(dtype).view(-1).as_strided(target.shape, target.stride(), where).copy_(source)
        words = _in_words(target, source)
        words[0].copy_(words[1])
        assert torch.equal(memory, want)
        in_words += words[0] is not target
        alone += words[0] is target
    assert min(in_words, alone) > 50


@pytest.mark.parametrize(
    ("backends", "device"), [("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo", "cpu")]
)
def test_device_of_a_rank_without_tensors(monkeypatch: pytest.MonkeyPatch, backends: str, device: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert group.data_device(None).type == device  # type: ignore[arg-type]
