"""Tags on gradients: which node of the graph is the gradient of which parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_new_library: Any = torch.library.Library  # its methods are not typed
library: Any = _new_library("dp_partition", "DEF")
library.define("tag_grad(Tensor(a) self, str name='') -> Tensor(a)")


def _same_tensor(grad: torch.Tensor, name: str = "") -> torch.Tensor:
    if grad.layout != torch.strided:
        return grad  # refused by name afterwards
    # Another object: autograd may hand this tensor on to other inputs (of a sum), whose gradient is not the average.
    return torch.ops.aten.alias.default(grad)  # type: ignore[no-any-return]


library.impl("tag_grad", _same_tensor, "CompositeExplicitAutograd")

TAG_GRAD = torch.ops.dp_partition.tag_grad.default


@contextmanager
def gradients_tagging(params: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within the block, every gradient that reaches a parameter passes through a tag with the parameter's name.

    Safe to trace: the tags become nodes of the graph, from which `build_data_parallel_strategies` removes them.

    Args:
        params: Parameters by name; those that need no gradient are passed over.
    """
    tensors: dict[str, Any] = dict(params)
    handles = [param.register_hook(_tagger(name)) for name, param in tensors.items() if param.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _DifferentiableTag(torch.autograd.Function):
    """The tag on a gradient that is differentiated again: the identity, whose derivative is the identity."""

    @staticmethod
    def forward(context: Any, grad: torch.Tensor, name: str) -> torch.Tensor:
        return TAG_GRAD(grad, name)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _tagger(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def tag(grad: torch.Tensor) -> torch.Tensor:
        apply: Any = _DifferentiableTag.apply
        tagged: torch.Tensor = apply(grad, name) if grad.requires_grad else TAG_GRAD(grad, name)
        return tagged

    return tag
