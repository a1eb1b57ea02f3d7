"""Between local tensors and DTensors, with the placements of the gradient said on both ways.

Torch's ``from_local`` and ``to_local`` do not tell what the gradient of a gradient is: a second derivative through a
partial sum comes out wrong, without an error. Here it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from shard_spec.apply.gradients import refuse_second_derivative
from shard_spec.distributed.parameter_format import dtensor_of

Placements = tuple[Placement, ...]


class _Meaning(NamedTuple):
    """A DTensor's mesh, global shape, placements, and the placements of its gradient."""

    mesh: DeviceMesh
    shape: torch.Size
    placements: Placements
    gradient: Placements


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """``local`` as a DTensor of global ``shape``. Its gradient lies alike; that of a partial sum is replicated."""
    gradient = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    meaning = _Meaning(mesh, torch.Size(shape), tuple(placements), gradient)
    wrapped: DTensor = _Wrap.apply(local, meaning)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return wrapped


def unwrap(value: DTensor, gradient: Sequence[Placement] | None = None) -> torch.Tensor:
    """The local tensor of ``value``.

    Args:
        value: Its placements say what the ranks hold.
        gradient: What the ranks' gradients will be. Default: the same; each rank has the whole gradient of its part of
            a partial sum.
    """
    default = tuple(Replicate() if placement.is_partial() else placement for placement in value.placements)
    gradient = default if gradient is None else tuple(gradient)
    meaning = _Meaning(value.device_mesh, value.shape, tuple(value.placements), gradient)
    made: torch.Tensor = _Unwrap.apply(value, meaning)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return made


def whole(value: DTensor, *, parts: bool) -> torch.Tensor:
    """All of ``value`` on every rank.

    Args:
        value: Any placements.
        parts: Whether the ranks' gradients are parts of a sum; otherwise every rank has the same whole gradient.
    """
    ndim = value.device_mesh.ndim
    gradient: list[Placement] = [Partial() if parts else Replicate()] * ndim
    return unwrap(value.redistribute(placements=[Replicate()] * ndim), gradient)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, meaning: _Meaning) -> DTensor:
        ctx.meaning = meaning
        return dtensor_of(local.detach().contiguous(), meaning.mesh, meaning.placements, meaning.shape)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivative()
        return grads[0].redistribute(placements=ctx.meaning.gradient).to_local(), None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor, meaning: _Meaning) -> torch.Tensor:
        ctx.meaning = meaning
        local = value.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[DTensor, None]:
        refuse_second_derivative()
        meaning: _Meaning = ctx.meaning
        return dtensor_of(grads[0].contiguous(), meaning.mesh, meaning.gradient, meaning.shape), None
