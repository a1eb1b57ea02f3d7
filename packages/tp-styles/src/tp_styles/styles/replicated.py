"""A module that is computed whole on every rank."""

from __future__ import annotations

from tp_styles.styles.base import ParallelStyle
from tp_styles.values.spec import ModuleInfo, ParameterSpec, StyleSpec
from tp_styles.values.split import Split


class NoParallel(ParallelStyle):
    """The module's parameters are whole on every rank, made equal by broadcast, and its forward is its own.

    Args:
        sum_gradient: The module stands inside a sharded region (a norm of this rank's heads): each rank computes a
            part of its parameters' gradients, and the parts are summed; dropout draws other numbers on each rank (see
            `tp_rng`). Without it every rank is taken to compute the
            whole gradient.
    """

    def __init__(self, *, sum_gradient: bool = False) -> None:
        super().__init__(None, None)
        self.sum_gradient = sum_gradient

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Nothing is split; see `ParallelStyle.spec`."""
        whole = ParameterSpec(Split.replicated(), sum_gradient=self.sum_gradient)
        return StyleSpec(
            compute="module",
            parameters=tuple((parameter.name, whole) for parameter in info.parameters),
            shards_randomness=self.sum_gradient,
        )

    def _arguments(self) -> dict[str, object]:
        return {"sum_gradient": self.sum_gradient}
