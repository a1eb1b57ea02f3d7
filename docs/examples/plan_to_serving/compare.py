"""The comparisons that the job claims: each is asserted, counted and listed at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class NotEqual(Exception):
    """A claim of the job does not hold."""


@dataclass(frozen=True)
class Comparison:
    """One claim that held: how many values were compared, and the greatest difference among them."""

    what: str
    num_values: int
    greatest: float
    limit: float
    kind: str  # "relative", "absolute", "bitwise"


@dataclass
class Comparisons:
    """Collects claims; the first that does not hold raises."""

    done: list[Comparison] = field(default_factory=list)

    def relative(self, what: str, found: Sequence[float], wanted: Sequence[float], limit: float) -> None:
        """Each of `found` is within `limit` of `wanted`, relative to it."""
        if len(found) != len(wanted) or not wanted:
            raise NotEqual(f"{what}: {len(found)} values against {len(wanted)}")
        greatest = max(abs(f - w) / abs(w) for f, w in zip(found, wanted, strict=True))
        self._add(Comparison(what, len(wanted), greatest, limit, "relative"))

    def absolute(self, what: str, found: Tensor, wanted: Tensor, limit: float) -> None:
        """Two tensors differ by at most `limit` anywhere."""
        if found.shape != wanted.shape or not wanted.numel():
            raise NotEqual(f"{what}: {tuple(found.shape)} against {tuple(wanted.shape)}")
        self._add(Comparison(what, wanted.numel(), (found - wanted).abs().max().item(), limit, "absolute"))

    def bitwise(self, what: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        """Two state dicts hold the same keys and the same bits."""
        if found.keys() != wanted.keys() or not wanted:
            raise NotEqual(f"{what}: keys differ: {sorted(found.keys() ^ wanted.keys())}")
        different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        if different:
            raise NotEqual(f"{what}: {different} differ")
        self._add(Comparison(what, sum(t.numel() for t in wanted.values()), 0.0, 0.0, "bitwise"))

    def equal(self, what: str, found: Sequence[int], wanted: Sequence[int]) -> None:
        """Two lists of whole numbers are the same."""
        if list(found) != list(wanted) or not wanted:
            raise NotEqual(f"{what}: {list(found)} against {list(wanted)}")
        self._add(Comparison(what, len(wanted), 0.0, 0.0, "bitwise"))

    def _add(self, comparison: Comparison) -> None:
        if not comparison.greatest <= comparison.limit:  # also refuses NaN
            raise NotEqual(
                f"{comparison.what}: {comparison.kind} difference {comparison.greatest:.2e} > {comparison.limit:.0e}"
            )
        self.done.append(comparison)

    def verdict(self) -> str:
        """One sentence; a claim that did not hold has raised before."""
        values = sum(c.num_values for c in self.done)
        return (
            f"All {len(self.done)} comparisons hold, over {values:,} values; the table below lists each with its limit."
        )

    def table(self) -> str:
        """One line a claim."""
        lines = [f"{'compared':58} {'values':>9}  {'greatest difference':>20}  {'limit':>8}"]
        for c in self.done:
            difference = "bit-equal" if c.kind == "bitwise" else f"{c.greatest:.1e} {c.kind}"
            lines.append(f"{c.what:58} {c.num_values:>9,}  {difference:>20}  {c.limit:>8.0e}")
        return "\n".join(lines)
