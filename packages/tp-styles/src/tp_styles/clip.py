"""Gradient norms over parameters of every kind: plain, local shards, DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tp_styles._torch_compat import scale_all_
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.shard_parameter import split_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over plain tensors, local shards and DTensors mixed.

    The norm is that of the global gradients: shards are summed over their axes, what every rank holds counts once. It
    is the same on every rank. One scalar is reduced for each axis that shards are on.

    Args:
        parameters: Parameters, in the same order on every rank.
        max_norm: Greatest norm that is left alone.
        norm_type: Order of the norm, also `inf`.
        error_if_nonfinite: Raise where the norm is not finite.
        foreach: Multi-tensor kernels for scaling; default: where all gradients are on one device that is no CPU.

    Returns:
        The norm before clipping, a plain tensor.

    Raises:
        PlanError: A gradient that is a partial sum, or an order that is not above 0.
        RuntimeError: A norm that is not finite, if that was asked for.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    order = float(norm_type)
    if not order > 0:
        raise PlanError(
            Problem("norm-type", "norm_type", found=str(norm_type), hint="orders above 0, and inf, can be put together")
        )
    if not parameters or all(parameter.grad is None for parameter in parameters):
        device = parameters[0].device if parameters else torch.device("cpu")
        # A rank without gradients still takes part in the sums of the others.
        if not any(_axes(parameter) for parameter in parameters):
            return torch.zeros((), device=device)
    total = _norm(parameters, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    _scale([p.grad for p in parameters if p.grad is not None], (max_norm / (total + 1e-6)).clamp(max=1.0), foreach)
    return total


def _norm(parameters: list[torch.Tensor], order: float) -> torch.Tensor:
    buckets: dict[Any, tuple[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]]] = {}
    for parameter in parameters:
        axes = _axes(parameter)
        key = None if axes is None else (axes[0], axes[1])
        buckets.setdefault(key, (axes, []))[1].extend(_terms(parameter, order))
    device = parameters[0].device
    dtype = torch.promote_types(torch.float32, _widest(parameters))
    sums = []
    for axes, terms in buckets.values():
        found = _combined(torch.stack([t.to(device, dtype) for t in terms]), order) if terms else None
        value = found if found is not None else torch.zeros((), device=device, dtype=dtype)
        if axes is not None:
            mesh, dims = axes
            op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            for dim in dims:
                dist.all_reduce(value, op=op, group=mesh.get_group(dim))
        sums.append(value)
    total = _combined(torch.stack(sums), order)
    return total if math.isinf(order) else total ** (1.0 / order)


def _axes(parameter: torch.Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its dims that different parts lie along; None for what every rank holds."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
    elif (info := getattr(parameter, "_sharding_info", None)) is not None:
        mesh, placements = info[0], info[1]
    else:
        return None
    dims = tuple(dim for dim, placement in enumerate(placements) if isinstance(placement, Shard) and mesh.size(dim) > 1)
    return (mesh, dims) if dims else None


def _terms(parameter: torch.Tensor, order: float) -> list[torch.Tensor]:
    """The sums of powers (or the greatest values) that this rank contributes for one gradient."""
    gradient = parameter.grad
    if gradient is None:
        return []
    if isinstance(gradient, DTensor):
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            raise PlanError(
                Problem("partial-gradient", found=str(gradient.placements), hint="reduce it before clipping")
            )
        if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = gradient.to_local()
    info = getattr(parameter, "_sharding_info", None)
    if info is None or len(info) < 5:
        return [_powers(gradient, order)]
    mesh, split = info[0], split_of(info)
    assert split.dim is not None
    found = []
    at = 0
    for section, (start, stop) in zip(split.sections, split.ranges(mesh.get_local_rank(), mesh.size()), strict=True):
        part = _powers(gradient.narrow(split.dim, at, stop - start), order)
        # `copies` ranks hold the same rows: together they count once.
        found.append(part if math.isinf(order) else part / section.copies)
        at += stop - start
    return found


def _powers(gradient: torch.Tensor, order: float) -> torch.Tensor:
    if math.isinf(order):
        return gradient.abs().max() if gradient.numel() else gradient.new_zeros(())
    return torch.linalg.vector_norm(gradient, order) ** order if gradient.numel() else gradient.new_zeros(())


def _combined(values: torch.Tensor, order: float) -> torch.Tensor:
    return values.max() if math.isinf(order) else values.sum()


def _widest(parameters: list[torch.Tensor]) -> torch.dtype:
    dtype = torch.float32
    for parameter in parameters:
        if parameter.grad is not None:
            dtype = torch.promote_types(dtype, parameter.grad.dtype)
    return dtype


@torch.no_grad()
def _scale(gradients: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    plain = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    one_device = len({gradient.device for gradient in plain}) == 1
    if foreach if foreach is not None else one_device and plain[0].device.type != "cpu":
        scale_all_(plain, factor)
        return
    for gradient in plain:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
