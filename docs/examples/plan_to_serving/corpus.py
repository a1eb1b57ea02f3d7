"""Real text that every machine with Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library(max_bytes: int = 4_000_000) -> Tensor:
    """The first `max_bytes` of the standard library's modules, in the order of their names; uint8, [bytes]."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def batches(text: Tensor, *, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows: (ids, the ids that follow them), int64, [batch, context] each.

    The same seed gives the same windows on every rank; a data-parallel rank takes its rows of each.
    """
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
        rows = text[starts + window].long()
        yield rows[:, :-1], rows[:, 1:]


def rows_of(pair: tuple[Tensor, Tensor], rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's rows of a batch that all ranks drew."""
    ids, targets = pair
    return ids.chunk(num_ranks)[rank], targets.chunk(num_ranks)[rank]
