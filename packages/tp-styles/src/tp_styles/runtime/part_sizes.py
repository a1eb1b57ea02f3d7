"""A parameter that is computed with is this rank's part of the one that the plan divided, whoever has put it there."""

from __future__ import annotations

import torch

from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.axis import Axis
from tp_styles.spec import StyleSpec


class PartSizes:
    """How long each parameter's part is along the dim that was divided.

    A whole weight in place of a part (`module.weight = nn.Parameter(whole)`, `functional_call` with a whole state dict,
    `weight.data = whole`) has shapes that fit each other from a column-wise to a row-wise layer: every rank would
    compute everything, and the sum would be that many times too large.

    Args:
        spec: What the plan says of the module's parameters.
        axis: Over which ranks.
        name: The module's FQN, for errors.
    """

    def __init__(self, spec: StyleSpec, axis: Axis, name: str) -> None:
        self.name = name
        self.sizes = {
            key: (
                parameter.split.dim,
                sum(stop - start for start, stop in parameter.split.ranges(axis.rank, axis.size)),
            )
            for key, parameter in spec.parameters
            if parameter.split.dim is not None
        }

    def check(self, name: str, local: torch.Tensor | None) -> None:
        """See that a local tensor has the size of this rank's part; one comparison.

        Raises:
            StyleInputError: It has another.
        """
        known = self.sizes.get(name)
        if known is None or local is None or local.shape[known[0]] == known[1]:
            return
        raise StyleInputError(
            Problem(
                "not-the-part",
                f"{self.name}.{name}".lstrip("."),
                dim=known[0],
                found=f"{local.shape[known[0]]} on this rank",
                hint=f"this rank's part has {known[1]}: load_state_dict() cuts whole tensors; or hand over the part",
            )
        )
