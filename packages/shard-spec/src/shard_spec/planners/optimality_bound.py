"""Proven quality of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimalityBound:
    """Proof of an optimising planner about its plan, under its own cost model.

    Attributes:
        objective: modelled cost of the plan (seconds a step, or bytes for balancing).
        lower_bound: no plan of the same search space costs less.
        unit: of both.
        method: how the bound was found.
        memory_bytes: bytes that the modelled part of a step needs on the fullest rank, where memory was modelled.
        memory_limit: the cap that was kept, if there was one.
        choices: name of each node of the model to the strategy that was chosen.
    """

    objective: float
    lower_bound: float
    unit: str = "s"
    method: str = "exact"
    memory_bytes: int | None = None
    memory_limit: int | None = None
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def gap(self) -> float:
        """Largest distance from the best plan, as a share of the objective; 0 means proven optimal."""
        if self.objective == self.lower_bound:
            return 0.0
        return (self.objective - self.lower_bound) / abs(self.objective)

    def __str__(self) -> str:
        proven = "optimal" if self.gap == 0 else f"at most {self.gap:.2%} above the best"
        text = f"{self.objective:.6g} {self.unit}, {proven} (bound {self.lower_bound:.6g} {self.unit}, {self.method})"
        if self.memory_limit is not None:
            text += f"; {self.memory_bytes:,} of {self.memory_limit:,} bytes"
        return text
