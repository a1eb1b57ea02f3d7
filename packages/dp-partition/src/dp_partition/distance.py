"""How far values are apart, and what several ranks' values are together."""

from __future__ import annotations

import math

import torch

from dp_partition.collectives import REDUCTIONS

# Relative to the greatest value of a tensor. Sums of a rank's parts round differently from one sum.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def combine(found: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The ranks' partial values reduced."""
    stacked = torch.stack(found)
    if kind in REDUCTIONS:
        return REDUCTIONS[kind](stacked)
    order = float(kind.removeprefix("norm"))
    return stacked.abs().pow(order).sum(0).pow(1 / order)


def distance(value: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Greatest difference, relative to the greatest value wanted and as it is; infinite for values of another kind."""
    if value.dtype != wanted.dtype:
        return math.inf, math.inf
    if not value.is_floating_point():
        apart = 0.0 if torch.equal(value, wanted) else math.inf
        return apart, apart
    odd = ~torch.isfinite(wanted)
    if (
        not torch.equal(value.nan_to_num(0.0)[odd], wanted.nan_to_num(0.0)[odd])
        or not torch.isfinite(value[~odd]).all()
    ):
        return math.inf, math.inf
    difference = (value - wanted)[~odd].abs()
    if not difference.numel():
        return 0.0, 0.0
    worst, scale = difference.max().item(), wanted[~odd].abs().max().item()
    return (worst / scale if scale else 0.0 if worst == 0 else math.inf), worst


def eps(value: torch.Tensor) -> float:
    """The rounding of a tensor's dtype; 0 for integers."""
    return torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0


def greatest(value: torch.Tensor) -> float:
    """The greatest finite value of a tensor; 0 for integers."""
    return value.abs().nan_to_num(posinf=0.0).max().item() if value.is_floating_point() and value.numel() else 0.0


def first_apart(value: torch.Tensor, wanted: torch.Tensor) -> str:
    """The first of the elements that differ most."""
    apart = (value.to(torch.float64) - wanted.to(torch.float64)).abs().nan_to_num(nan=math.inf)
    index = int(apart.reshape(-1).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), value.shape)]
    one, other = value.reshape(-1)[index].item(), wanted.reshape(-1)[index].item()
    return f"{one:.6g} at {place}, expected {other:.6g}"


def is_plain(value: torch.Tensor) -> bool:
    """Whether the tensor's elements lie apart, so that it can be written."""
    return all(stride != 0 or size == 1 for stride, size in zip(value.stride(), value.shape, strict=True))


__all__ = ["TOLERANCE", "combine", "distance", "eps", "first_apart", "greatest", "is_plain"]
