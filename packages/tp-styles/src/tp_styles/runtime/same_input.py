"""Finds parameters inside sharded regions that no style stands on: their gradients would be those of one rank alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._torch_compat import is_compiling
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.axis import Axis

SAMPLE = 64
TOLERANCE = 1e-2
"""Of the largest value: kernels may round in another order on each rank, parts of an activation differ altogether."""


class SameInput:
    """Pre-hook of an unstyled module with trainable parameters: in the first forward with gradients, ranks compare.

    What every rank computes from the same whole input has the same, whole gradient everywhere. What is computed from
    this rank's part has a part of the gradient, and the ranks' parameters would drift apart.

    Args:
        axis: Over which ranks.
        name: The module's FQN.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis = axis
        self.name = name
        self.done = axis.size == 1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs between the ranks, once.

        Raises:
            StyleInputError: They differ; on every rank.
        """
        if self.done or not torch.is_grad_enabled() or is_compiling():
            return
        if not any(parameter.requires_grad for parameter in module._parameters.values() if parameter is not None):
            return
        own = [_sample(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        found: list[Any] = [None] * self.axis.size
        dist.all_gather_object(found, own, group=self.axis.group)
        if not all(_alike(found[0], other) for other in found[1:]):
            raise StyleInputError(
                Problem(
                    "partial-gradient",
                    self.name,
                    found="another input on each rank: it stands between column-wise and row-wise layers, unstyled",
                    hint="NoParallel(sum_gradient=True) for it (norms= of GQAParallel); SequenceParallel on a sequence"
                    ' shard; apply_plan(check="never") if its gradients are summed elsewhere',
                )
            )
        self.done = True


def _sample(x: torch.Tensor) -> tuple[tuple[int, ...], list[float]]:
    """Shape, and some of the values."""
    local = x.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if local.is_meta or local.is_complex() or not local.numel():
        return tuple(x.shape), []
    flat = local.reshape(-1)
    return tuple(x.shape), flat[:: max(flat.numel() // SAMPLE, 1)][:SAMPLE].double().tolist()


def _alike(one: list[tuple[Any, list[float]]], other: list[tuple[Any, list[float]]]) -> bool:
    if [shape for shape, _ in one] != [shape for shape, _ in other]:
        return False
    return all(_close(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def _close(one: list[float], other: list[float]) -> bool:
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    largest = float(a.nan_to_num().abs().max()) if one else 0.0
    return bool(torch.allclose(a, b, atol=TOLERANCE * largest, rtol=0.0, equal_nan=True))
