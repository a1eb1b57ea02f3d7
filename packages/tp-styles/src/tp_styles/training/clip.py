"""Gradient norms over parameters of every kind and mesh: plain tensors, local shards, DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import scale_all_
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.parameters import split_of

Axis = tuple[int, ...]
"""A mesh axis as the global ranks of this rank's group: meshes that share an axis have the same tuple."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for any mix of plain tensors, local shards and DTensors, on any meshes.

    The norm is that of the global gradients: every element counts once, however many ranks hold it, and the result is
    bit-equal on all ranks of a mesh. One scalar is reduced over each axis of each mesh; a mesh whose axes all belong
    to a larger one (`mesh["tp"]` beside FSDP2's `mesh["dp", "tp"]`) shares that mesh's reductions.

    Args:
        parameters: Parameters, in the same order on every rank; one that is listed twice counts once.
        max_norm: Largest norm that is left unchanged.
        norm_type: Order of the norm, above 0; also `inf`.
        error_if_nonfinite: Raise if the norm is not finite.
        foreach: Multi-tensor kernels for scaling; default: where all gradients are on one device other than the CPU.

    Returns:
        The norm before clipping, a plain tensor.

    Raises:
        PlanError: A gradient that is a partial sum, or an order that is not above 0.
        RuntimeError: A norm that is not finite, if that was asked for.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    unique = list({id(parameter): parameter for parameter in listed}.values())
    order = float(norm_type)
    if not order > 0:
        raise PlanError(
            Problem(
                "invalid-argument", "norm_type", found=str(norm_type), hint="orders above 0, and inf, can be combined"
            )
        )
    if not unique:
        return torch.zeros(())
    total = _norm(unique, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    gradients = [parameter.grad for parameter in unique if parameter.grad is not None]
    if gradients:
        _scale(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0), foreach)
    return total


@dataclass
class _Contribution:
    """Terms of this rank: sums of powers, or largest values, of gradients with one layout.

    Attributes:
        axes: Axes of the mesh that the gradients live on; empty for plain tensors.
        sharded: Those of them along which every rank holds other elements.
        terms: One scalar or more for each gradient.
    """

    axes: frozenset[Axis]
    sharded: frozenset[Axis]
    terms: list[torch.Tensor]


def _norm(parameters: list[torch.Tensor], order: float) -> torch.Tensor:
    meshes = _Meshes()
    contributions: dict[Any, _Contribution] = {}
    for parameter in parameters:
        axes, sharded = meshes.layout(parameter)
        found = contributions.setdefault((axes, sharded), _Contribution(axes, sharded, []))
        found.terms += _terms(parameter, order)
    device = parameters[0].device
    dtype = _accumulation_dtype(parameters)
    sums: dict[frozenset[Axis], list[torch.Tensor]] = {}
    for found in contributions.values():
        carrier = meshes.carrier(found.axes)
        # Replicas count once: of the ranks that hold equal elements only the first of each axis contributes. So all
        # ranks add the same numbers, and get the same bits, also where replicas differ by rounding.
        is_first = all(dist.get_rank() == axis[0] for axis in carrier - found.sharded)
        terms = [term.to(device, dtype) for term in found.terms] if is_first else []
        sums.setdefault(carrier, []).append(_combined(terms, order, device, dtype))
    op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    totals = []
    # Every rank goes through meshes and axes in the order of the parameters: the collectives match, also on a rank
    # that has no gradients.
    for carrier, values in sums.items():
        total = _combined(values, order, device, dtype)
        for axis, group in meshes.groups.items():
            if axis in carrier:
                dist.all_reduce(total, op=op, group=group)
        totals.append(total)
    result = _combined(totals, order, device, dtype)
    return result if math.isinf(order) else result ** (1.0 / order)


class _Meshes:
    """The axes of all meshes that a list of parameters lives on, in their order of appearance."""

    def __init__(self) -> None:
        self.groups: dict[Axis, dist.ProcessGroup] = {}
        self.known: dict[DeviceMesh, tuple[Axis | None, ...]] = {}
        self.carriers: dict[frozenset[Axis], None] = {}

    def layout(self, parameter: torch.Tensor) -> tuple[frozenset[Axis], frozenset[Axis]]:
        """The axes of a parameter's mesh, and those along which it is sharded."""
        placed = _placed(parameter)
        if placed is None:
            return frozenset(), frozenset()
        mesh, placements = placed
        axes = self._axes(mesh)
        # Every placement other than a replica is a shard here: `_StridedShard` (TP beside FSDP2) is no `Shard`.
        sharded = [a for a, p in zip(axes, placements, strict=True) if a is not None and not isinstance(p, Replicate)]
        return frozenset(a for a in axes if a is not None), frozenset(sharded)

    def _axes(self, mesh: DeviceMesh) -> tuple[Axis | None, ...]:
        if mesh not in self.known:
            found: list[Axis | None] = []
            for dim in range(mesh.ndim):
                if mesh.size(dim) == 1:
                    found.append(None)
                    continue
                group = mesh.get_group(dim)
                axis = tuple(dist.get_process_group_ranks(group))
                self.groups.setdefault(axis, group)
                found.append(axis)
            self.known[mesh] = tuple(found)
            self.carriers.setdefault(frozenset(axis for axis in found if axis is not None))
        return self.known[mesh]

    def carrier(self, axes: frozenset[Axis]) -> frozenset[Axis]:
        """The axes that a contribution is reduced over: those of the largest mesh that has all of `axes`."""
        return max((mesh for mesh in (*self.carriers, axes) if mesh >= axes), key=len)


def _placed(parameter: torch.Tensor) -> tuple[DeviceMesh, Sequence[Placement]] | None:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    info = sharding_info_of(parameter)
    return None if info is None else (info.mesh, info.placements)


def _terms(parameter: torch.Tensor, order: float) -> list[torch.Tensor]:
    """The sums of powers, or the largest values, that this rank holds of one gradient."""
    gradient = parameter.grad
    if gradient is None:
        return []
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            raise PlanError(
                Problem("partial-gradient", found=str(gradient.placements), hint="reduce it before clipping")
            )
        if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = gradient.to_local()
    info = sharding_info_of(parameter)
    if info is None or not info.sections:
        return [_powers(gradient, order)]
    mesh, split = info.mesh, split_of(info)
    assert split.dim is not None
    found = []
    at = 0
    for section, (start, stop) in zip(split.sections, split.ranges(mesh.get_local_rank(), mesh.size()), strict=True):
        term = _powers(gradient.narrow(split.dim, at, stop - start), order)
        # `copies` ranks hold the same rows: together they count once.
        found.append(term if math.isinf(order) else term / section.copies)
        at += stop - start
    return found


def _powers(gradient: torch.Tensor, order: float) -> torch.Tensor:
    gradient = gradient.abs() if gradient.is_complex() else gradient
    dtype = torch.promote_types(torch.float32, gradient.dtype)
    if not gradient.numel():
        return gradient.new_zeros((), dtype=dtype)
    if math.isinf(order):
        return gradient.abs().max().to(dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return torch.pow(norm, order)


def _combined(values: list[torch.Tensor], order: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not values:
        return torch.zeros((), device=device, dtype=dtype)
    stacked = torch.stack(values)
    return stacked.max() if math.isinf(order) else stacked.sum()


def _accumulation_dtype(parameters: list[torch.Tensor]) -> torch.dtype:
    """The widest type of the parameters (not of gradients, which a rank may lack), at least float32."""
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())
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
