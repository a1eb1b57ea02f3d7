"""Gradients that lie as their parameters do."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


class LayGradient:
    """A tensor hook on a DTensor parameter: its gradient, laid out like the parameter.

    A DTensor op that gathers a sharded parameter by itself leaves a whole gradient, one that replicates it partial
    sums. Both are right, but take more memory than the plan says, and every op of an optimizer reduces them again.
    """

    # Torch warns that hooks of a tensor are not saved with it; without it a module computes the same.
    __torch_unserializable__ = True

    def __init__(self, placements: tuple[Placement, ...]) -> None:
        self.placements = placements

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Redistribute; a plain gradient (somebody made the parameter local) is handed on."""
        if isinstance(grad, DTensor) and tuple(grad.placements) != self.placements:
            return grad.redistribute(placements=self.placements)
        return grad
