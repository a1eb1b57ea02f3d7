"""Sums of all parameters' gradients over an axis, in one message a type, at the end of a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._shared.shard_values import plain
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import is_compiling
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.redistribute import TPGroup

BUCKET_BYTES = 2**25


class GradientSum:
    """Replaces a model's parameters during a forward, so that their gradients are summed over an axis.

    Shards over the axis itself (whole experts of each rank) are left alone: tokens of all ranks come to them. So are
    parameters whose gradient a style of their own module sums over the axis.

    A parameter without a gradient on one rank (an expert without tokens) counts as zeros there. Each message counts the
    ranks that have one: a parameter without a gradient anywhere keeps none.

    Args:
        axis: The ranks.
    """

    def __init__(self, axis: TPGroup) -> None:
        self.axis = axis

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Replace the parameters that learn; a tied one under all its names."""
        apart = self._summed_by_others(model)
        places = [
            (owner._parameters, key, parameter)
            for owner in model.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad
            if not (self._is_shard(parameter) or id(parameter) in apart)
        ]
        unique = list({id(parameter): parameter for _, _, parameter in places}.values())
        if not unique or not torch.is_grad_enabled():
            yield
            return
        locals = [p.to_local() if isinstance(p, DTensor) else plain(p) for p in unique]
        views = _Summed.apply(self, *locals)  # type: ignore[no-untyped-call]  # torch's
        new: dict[int, Any] = {id(p): _like(view, p) for p, view in zip(unique, views, strict=True)}
        for table, key, parameter in places:
            table[key] = new[id(parameter)]
        try:
            yield
        finally:
            for table, key, parameter in places:
                table[key] = parameter

    def _summed_by_others(self, model: nn.Module) -> set[int]:
        """Return parameters, by id, that another forward of the axis sums: a norm that all experts share."""
        forwards = [(module, vars(module).get("forward")) for module in model.modules()]
        return {
            id(module.get_parameter(name))
            for module, forward in forwards
            if isinstance(forward, Forward) and forward.axis.mesh == self.axis.mesh
            for name in forward.sums
        }

    def _is_shard(self, parameter: torch.Tensor) -> bool:
        """True if the ranks of the axis hold different rows of a parameter."""
        info = sharding_info_of(parameter)
        if isinstance(parameter, DTensor):
            return parameter.device_mesh == self.axis.mesh and parameter.placements[0].is_shard()
        return info is not None and info.mesh == self.axis.mesh and info.placements[0].is_shard()

    def reduced(self, gradients: list[torch.Tensor | None], like: list[Any]) -> list[torch.Tensor | None]:
        """Return the sums of the ranks' gradients."""
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise StyleInputError(
                Problem("sparse-gradient", found="a sparse gradient", hint="nn.Embedding(sparse=False)")
            )
        mine = [gradient is not None for gradient in gradients]
        sums: list[torch.Tensor | None] = [None] * len(gradients)
        for indices in self._buckets(gradients, like):
            pieces = [_dense(gradients[index], like[index]).reshape(-1) for index in indices]
            has_all = all(mine[index] for index in indices)
            flags = pieces[0].new_ones(len(indices)) if has_all else pieces[0].new_tensor([mine[i] for i in indices])
            sizes = [piece.numel() for piece in pieces]
            *parts, counts = self.axis.all_reduce_(torch.cat([*pieces, flags])).split([*sizes, len(indices)])
            # A rank with every gradient knows the answer: it does not wait for its device to read the counts.
            used = [mine[i] for i in indices] if has_all or is_compiling() else [c != 0 for c in counts.tolist()]
            for index, part, is_used in zip(indices, parts, used, strict=True):
                sums[index] = part.view(like[index][0]) if is_used else None
        return sums

    def _buckets(self, gradients: list[torch.Tensor | None], like: list[Any]) -> Iterator[list[int]]:
        """Yield indices of gradients that travel together: one type and device, up to `BUCKET_BYTES`."""
        kinds: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for index, (shape, dtype, device) in enumerate(like):
            kind = dtype, device
            size = shape.numel() * dtype.itemsize
            if kind not in kinds or sizes[kind] + size > BUCKET_BYTES:
                kinds.setdefault(kind, []).append([])
                sizes[kind] = 0
            kinds[kind][-1].append(index)
            sizes[kind] += size
        for buckets in kinds.values():
            yield from buckets


def _dense(gradient: torch.Tensor | None, like: Any) -> torch.Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient


def _like(view: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a local tensor in the form of its parameter."""
    if not isinstance(parameter, DTensor):
        return view
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    wrapped: torch.Tensor = DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)
    return wrapped


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: GradientSum, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.owner.reduced(list(gradients), ctx.like))
