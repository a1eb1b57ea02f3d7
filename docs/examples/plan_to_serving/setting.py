"""What every step of the job shares: sizes, data, runs so far, and the comparisons that were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from compare import Comparisons
from corpus import batches, rows_of
from model import GPT, GPTConfig, new_model
from torch import Tensor
from traffic import Line
from training import Batch, Run
from world import World

RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-9}  # losses of two correct variants of one model over 20 AdamW steps
NAMES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass
class Setting:
    """One run of the job."""

    world: World
    config: GPTConfig
    text: Tensor
    dp: int
    tp: int
    batch: int
    num_steps: int
    num_compared: int
    styles: tuple[str, ...]
    comparisons: Comparisons = field(default_factory=Comparisons)
    runs: dict[str, Run] = field(default_factory=dict)
    traffic: list[Line] = field(default_factory=list)
    pages: dict[str, Any] = field(default_factory=dict)  # what the packages drew and said, for the report

    def new_model(self, dtype: torch.dtype = torch.float32) -> GPT:
        return new_model(self.config, dtype=dtype).to(self.world.device)

    def batches(self) -> Iterator[Batch]:
        """The same global batches for every run."""
        drawn = batches(self.text, batch=self.batch, context=self.config.context, seed=1)
        return ((ids.to(self.world.device), targets.to(self.world.device)) for ids, targets in drawn)

    def batches_of(self, rank: int, num_ranks: int) -> Iterator[Batch]:
        """The rows of one data-parallel rank."""
        return (rows_of(pair, rank, num_ranks) for pair in self.batches())

    def compare_losses(self, run: Run, reference: Run, dtype: torch.dtype) -> None:
        """The first steps of a run against those on one device."""
        claim = f"losses, {run.name} and one device, {NAMES[dtype]}"
        expected = reference.losses[: self.num_compared]
        self.comparisons.relative(claim, run.losses[: self.num_compared], expected, RELATIVE[dtype])


def printer(setting: Setting, title: str, total: int) -> Callable[[int, float], None]:
    """A function of step and loss: on rank 0 it prints three lines a run."""

    def print_step(step: int, loss: float) -> None:
        if setting.world.rank == 0 and step in (1, total // 2, total):
            print(f"{title}: step {step}/{total}, loss {loss:.3f}", flush=True)

    return print_step
