"""Rows of a report: each value of both runs, how it compares, and why some are unchecked.

Counts, texts and errors of a first call's check and of `compare` are derived from these rows, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from tp_styles._shared.execution_check import Compared, as_double, relative_error

GRADIENTS = ("gradient", "input-gradient")

# Norm of a difference, relative to the gradient's: of two independent halves of a sum each is off by 0.7.
ONE_RANKS_PART = 0.4


@dataclass(frozen=True)
class Row:
    """One value of both runs.

    Attributes:
        kind: `"raises"`, `"output"`, `"attribute"`, `"gradient"`, `"input-gradient"`, `"gradient-norm"`, `"buffer"` or
            `"shard-leaves"`.
        name: Name of the value.
        verdict: Unchecked are values of zero in both runs, up to the tolerance, since a mistake in one would not show,
            and values without a counterpart.
        error: The largest difference, relative to the largest value.
        reason: Further details of a difference, or the reason for an unchecked value.
        numel: Number of compared elements.
        ranks: Ranks with this verdict on the value, of a joined row.
    """

    kind: str
    name: str
    verdict: Literal["equal", "differs", "unchecked"] = "differs"
    error: float = math.inf
    reason: str = ""
    numel: int = 0
    ranks: tuple[int, ...] = ()

    def text(self, original: str, run: str = "") -> str:
        """Return the text of a difference from `original`, as "the original's"; `run` says how that has run."""
        by = f" by {self.error:.2g}" if math.isfinite(self.error) else ""
        return f"{self.kind} differs from {original}{by}{run}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Pair:
    """A value of both runs, in one shape.

    Attributes:
        kind: As of a `Row`.
        name: Its name.
        value: This rank's shard, or the full one.
        wanted: The original's, of the same elements; no DTensor, since single ranks read it.
        size: The largest element of the original's on all ranks.
    """

    kind: str
    name: str
    value: torch.Tensor
    wanted: torch.Tensor
    size: float

    def row(self, tolerance: float, floor: float = 0.0) -> Row:
        """Compare both, relative to the largest element, or to `floor`."""
        difference, limit = error(self.value, self.wanted, floor=floor), tolerance
        if self.kind in GRADIENTS and tolerance > ONE_RANKS_PART and difference <= tolerance:
            # In bfloat16 one element may be off by 0.6. Over all elements rounding cancels, a missing sum does not.
            norm_floor = floor * math.sqrt(self.wanted.numel())
            difference = relative_error(self.value, self.wanted, floor=norm_floor, any_dtype=True)
            limit = ONE_RANKS_PART
        if difference > limit:
            return Row(self.kind, self.name, error=difference, reason=_ratio(self.value, self.wanted))
        if self.value.numel() and self.size <= floor * tolerance:
            return Row(self.kind, self.name, "unchecked", reason="zero in both")
        return Row(self.kind, self.name, "equal", difference, numel=self.value.numel())


def _ratio(ours: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return a text if one value is a multiple of the other: the usual trace of a wrong divisor or a lost sum."""
    if ours.shape != wanted.shape or not largest(wanted) or not largest(ours):
        return "" if largest(ours) else "it is zero"
    mine, other = as_double(ours).flatten(), as_double(wanted).flatten().to(ours.device)
    factor = float(mine @ other / (other @ other))
    if factor and float((mine - factor * other).norm()) <= 1e-4 * float(mine.norm()):
        return f"it is {factor:.4g} times the original's"
    return ""


def gradient_rows(pairs: Sequence[Pair], tolerance: float) -> list[Row]:
    """Compare gradients.

    True zeros (the bias of keys before a softmax) are noise in both runs: the floor compares them to other gradients.
    """
    floor = 1e-2 * max((pair.size for pair in pairs), default=0.0)
    return [pair.row(tolerance, floor) for pair in pairs]


def counts(rows: Iterable[Row]) -> Compared:
    """Count the compared values of some rows."""
    equal = [row for row in rows if row.verdict == "equal"]
    gradients = sum(row.kind in GRADIENTS for row in equal)
    return Compared(len(equal) - gradients, sum(row.numel for row in equal), gradients)


def tolerance_of(epsilon: float) -> float:
    """Return the relative tolerance for the coarsest rounding of a computation."""
    return max(1e-9, epsilon * (8 if epsilon > 1e-4 else 1000))


def joined(everyone: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row for each value that any rank lists, equal ones left out; `ranks` are those with its verdict.

    A difference on one rank is one of all: the largest stands. A value that one rank alone has not compared (a gradient
    of zeros, of which the others hold no rows) is unchecked.
    """
    listed: dict[tuple[str, str], list[Row]] = {}
    for rank, row in [(rank, row) for rank, rows in enumerate(everyone) for row in rows if row.verdict != "equal"]:
        listed.setdefault((row.kind, row.name), []).append(replace(row, ranks=(rank,)))
    result = []
    for rows in listed.values():
        worst = max(rows, key=lambda row: (row.verdict == "differs", row.error))
        ranks = dict.fromkeys(row.ranks[0] for row in rows if row.verdict == worst.verdict)
        result.append(replace(worst, ranks=tuple(ranks)))
    return result


def error(actual: torch.Tensor, other: torch.Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value of `other` (and `floor`)."""
    other = full_of(other)
    return relative_error(actual, other, norm=math.inf, floor=floor, any_dtype=True)


def full_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's global value."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest(x: torch.Tensor) -> float:
    """Return the largest finite absolute value, 0 for an empty tensor."""
    x = x.detach()
    x = torch.view_as_real(x) if x.is_complex() else x
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
