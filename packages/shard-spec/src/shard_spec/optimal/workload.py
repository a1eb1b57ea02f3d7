"""Workload of a training step: the numbers that parameters do not give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One training step over all ranks.

    Args:
        batch: sequences of the whole step, on all ranks together.
        sequence: tokens of a sequence.
        recompute: whether blocks recompute their insides in backward, so that only the residual stream is kept.
        activation_bytes: of one activation value (2: bfloat16).
        weight_bytes: of one weight as it is communicated and multiplied.
        state_bytes: of one weight's everything on the rank that holds it: weight, gradient, optimizer. 16 is bfloat16
            weight and gradient, float32 master copy and two Adam moments.
        overlap: share of the time for gathering weights and reducing gradients that hides behind matmuls.
        causal: whether attention looks back only, which halves its operations.

    Raises:
        ValueError: a number makes no sense.
    """

    batch: int
    sequence: int
    recompute: bool = True
    activation_bytes: int = 2
    weight_bytes: int = 2
    state_bytes: int = 16
    overlap: float = 0.0
    causal: bool = True

    def __post_init__(self) -> None:
        for field in ("batch", "sequence", "activation_bytes", "weight_bytes", "state_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"Workload({field}={getattr(self, field)}): at least 1.")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Workload(overlap={self.overlap}): a share between 0 and 1.")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence
