"""Rows of the table: a train step as people write it, its objects and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ROWS_OF_A_RANK = 4


class Draw:
    """Draws one rank's batch of a call; the same call and rank give the same batch."""

    def __init__(self, call: int, rank: int) -> None:
        self.call, self.rank = call, rank
        self.generator = torch.Generator().manual_seed(1000 * call + rank)

    def x(self, *shape: int) -> torch.Tensor:
        """Normal numbers, a row for each sample."""
        return torch.randn(ROWS_OF_A_RANK, *shape, generator=self.generator)

    def unit(self, *shape: int) -> torch.Tensor:
        """Numbers between 0 and 1."""
        return torch.rand(ROWS_OF_A_RANK, *shape, generator=self.generator)

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """Class numbers or tokens below ``high``."""
        return torch.randint(high, (ROWS_OF_A_RANK, *shape), generator=self.generator)


@dataclass
class Script:
    """A step and what it trains.

    Attributes:
        step: The function that a user would give to `compile`.
        fixed: Its arguments in front of the batch.
        batch: Draw -> the other arguments of a call.
        watched: Modules and tensors whose values are compared after the last call, containers of them, or functions.
    """

    step: Callable[..., Any]
    fixed: tuple[Any, ...]
    batch: Callable[[Draw], tuple[Any, ...]]
    watched: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: The row.
        source: Where people write such a step.
        build: Returns a new script.
        independent: The loss is a mean over rows without draws, so that one process on all rows is a reference, too.
        limit: Greatest relative error that counts as right.
        is_late: Chosen after the code was done.
    """

    name: str
    source: str
    build: Callable[[], Script]
    independent: bool
    limit: float
    is_late: bool


ROWS: dict[str, Row] = {}


def row(source: str, *, independent: bool = True, limit: float = 1e-8, is_late: bool = False) -> Any:
    """Add the decorated builder to the table."""

    def add(build: Callable[[], Script]) -> Callable[[], Script]:
        name = build.__name__.replace("_", " ")
        assert name not in ROWS, name
        ROWS[name] = Row(name, source, build, independent, limit, is_late)
        return build

    return add


# ---- small models that many rows train ------------------------------------------------------------------------------


def mlp(inputs: int = 8, width: int = 16, outputs: int = 4, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), act(), nn.Linear(width, width), act(), nn.Linear(width, outputs)
    )  # fmt: skip


class ConvNet(nn.Module):
    """Two convolutions and a head, on images of 8 x 8."""

    def __init__(self, channels: int = 1, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


class TinyGPT(nn.Module):
    """A causal transformer of two blocks."""

    def __init__(self, vocab: int = 24, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        hidden = self.embed(ids) + self.place(torch.arange(length))
        return self.head(self.blocks(hidden, mask=mask))


class Denoiser(nn.Module):
    """Predicts noise from a noisy vector and its time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(10, width), mlp(2 * width, 16, width, nn.SiLU)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, self.time(t)], 1))
