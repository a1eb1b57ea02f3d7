"""Greedy text from a model, and where two models' texts may part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sample:
    """Greedy continuation of a prompt: the bytes, and how far the best logit led the second at each."""

    ids: list[int]
    leads: list[float]

    @property
    def text(self) -> str:
        return bytes(self.ids).decode("utf-8", errors="replace")

    def first_close_call(self, lead: float) -> int:
        """The first position at which the two best logits were closer than `lead`; the length if none was."""
        return next((i for i, value in enumerate(self.leads) if value < lead), len(self.leads))


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of every position, [batch, time, vocab]."""
    model.eval()
    out: Tensor = model(ids)
    return out


@torch.no_grad()
def greedy(model: nn.Module, prompt: bytes, num_new: int, context: int) -> Sample:
    """Extend a prompt byte by byte with the best logit."""
    model.eval()
    ids, leads = list(prompt), []
    for _ in range(num_new):
        window = torch.tensor([ids[-context:]])
        best = model(window)[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return Sample(ids[len(prompt) :], leads)
