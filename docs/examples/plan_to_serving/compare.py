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

    claims: list[Comparison] = field(default_factory=list)

    def relative(self, what: str, values: Sequence[float], expected: Sequence[float], limit: float) -> None:
        """Each of `values` is within `limit` of `expected`, relative to it."""
        if len(values) != len(expected) or not expected:
            raise NotEqual(f"{what}: {len(values)} values against {len(expected)}")
        greatest = max(abs(value - e) / abs(e) for value, e in zip(values, expected, strict=True))
        self._add(Comparison(what, len(expected), greatest, limit, "relative"))

    def absolute(self, what: str, values: Tensor, expected: Tensor, limit: float) -> None:
        """Two tensors differ by at most `limit` anywhere."""
        if values.shape != expected.shape or not expected.numel():
            raise NotEqual(f"{what}: {tuple(values.shape)} against {tuple(expected.shape)}")
        self._add(Comparison(what, expected.numel(), (values - expected).abs().max().item(), limit, "absolute"))

    def bitwise(self, what: str, values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        """Two state dicts hold the same keys and the same bits."""
        if values.keys() != expected.keys() or not expected:
            raise NotEqual(f"{what}: keys differ: {sorted(values.keys() ^ expected.keys())}")
        different = [name for name in expected if not torch.equal(values[name], expected[name])]
        if different:
            raise NotEqual(f"{what}: {different} differ")
        self._add(Comparison(what, sum(t.numel() for t in expected.values()), 0.0, 0.0, "bitwise"))

    def equal(self, what: str, values: Sequence[int], expected: Sequence[int]) -> None:
        """Two lists of whole numbers are the same."""
        if list(values) != list(expected) or not expected:
            raise NotEqual(f"{what}: {list(values)} against {list(expected)}")
        self._add(Comparison(what, len(expected), 0.0, 0.0, "bitwise"))

    def _add(self, comparison: Comparison) -> None:
        if not comparison.greatest <= comparison.limit:  # also refuses NaN
            raise NotEqual(
                f"{comparison.what}: {comparison.kind} difference {comparison.greatest:.2e} > {comparison.limit:.0e}"
            )
        self.claims.append(comparison)

    def verdict(self) -> str:
        """One sentence; a claim that did not hold has raised before."""
        count, values = len(self.claims), sum(c.num_values for c in self.claims)
        return f"All {count} comparisons hold, over {values:,} values; the table below lists each with its limit."

    def table(self) -> str:
        """One line a claim."""
        lines = [f"{'compared':58} {'values':>9}  {'greatest difference':>20}  {'limit':>8}"]
        for c in self.claims:
            difference = "bit-equal" if c.kind == "bitwise" else f"{c.greatest:.1e} {c.kind}"
            lines.append(f"{c.what:58} {c.num_values:>9,}  {difference:>20}  {c.limit:>8.0e}")
        return "\n".join(lines)
