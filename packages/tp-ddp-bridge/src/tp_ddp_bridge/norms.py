"""The gradient norm of the whole model, the same on every rank.

Each rank adds up what it alone holds; one all-reduce per tensor-parallel group adds the groups' ranks up. Gradients
that several ranks hold whole, and leaves that have several names, count once. Data-parallel ranks have equal gradients
already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._torch_compat import foreach_norms, foreach_scale, local_of
from tp_ddp_bridge.layout import Layout, layout_of
from tp_ddp_bridge.marks import is_marked
from tp_ddp_bridge.problems import PlanError, Problem


@dataclass(eq=False)
class GradPart:
    """What this rank holds of one gradient.

    Attributes:
        local: The local gradient, the very memory that clipping scales; ``None`` if the parameter has no gradient. It
            is a part all the same, so that the ranks agree on the collectives whatever each of them used.
        counted: What the norm counts: ``local``, except for gradients that lie otherwise than their parameter.
        device: Where the parameter lies.
        dtype: Of the parameter.
        groups: Groups over which the parameter is sharded, by their ranks.
    """

    local: torch.Tensor | None
    counted: torch.Tensor | None
    device: torch.device
    dtype: torch.dtype
    groups: dict[tuple[int, ...], dist.ProcessGroup]


def grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all gradients together, as one process with the whole model would compute it.

    Args:
        parameters: Leaves, DTensor parameters and plain ones in any mixture; the same on all ranks.
        norm_type: The p of the p-norm, ``math.inf`` for the largest element. Not 0.
        error_if_nonfinite: Raise if the norm is NaN or infinite (on all ranks alike).
        foreach: Horizontal kernels; by default where the device has them.

    Returns:
        A 0-dim tensor, equal on all ranks. Communicates one all-reduce of a few numbers per tensor-parallel group that
        a parameter is sharded over; none if there is no such parameter.

    Raises:
        PlanError: A parameter of unknown layout among the leaves of a bridged module.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
    """
    listed = _listed(parameters)
    return _norm(_parts(listed), norm_type, error_if_nonfinite, foreach)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their common norm is at most ``max_norm``; torch's signature.

    Args:
        parameters: As in ``grad_norm``.
        max_norm: Greatest norm left.
        norm_type: As in ``grad_norm``.
        error_if_nonfinite: As in ``grad_norm``.
        foreach: As in ``grad_norm``.

    Returns:
        The norm before clipping, a 0-dim tensor, equal on all ranks.
    """
    parts = _parts(_listed(parameters))
    total = _norm(parts, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for (device, _), grads in _by_device([part.local for part in parts if part.local is not None]).items():
        moved = factor.to(device)
        if _use_foreach(grads, foreach):
            foreach_scale(grads, moved)
        else:
            for grad in grads:
                grad.mul_(moved)
    return total


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter once, in order."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in given}.values())


def _parts(parameters: list[torch.Tensor]) -> list[GradPart]:
    """What this rank holds of every gradient there is; layouts are known or the call fails."""
    layouts = [layout_of(parameter) for parameter in parameters]
    # A bridged module marks all its parameters, so one without a mark has lost it or is of another module. Elsewhere
    # plain parameters beside sharded ones are whole, as everywhere in tensor parallelism.
    if any(is_marked(parameter) for parameter in parameters):
        unknown = [
            Problem(
                "unknown-layout",
                f"parameter {index} of shape {tuple(parameter.shape)}",
                found="a plain tensor among leaves of a bridged module: whole on every rank, or a shard?",
                hint="bridge the module it belongs to, or set its _sharding_info",
            )
            for index, (parameter, layout) in enumerate(zip(parameters, layouts, strict=True))
            if layout is None
        ]
        if unknown:
            raise PlanError(unknown, "the norm of gradients of unknown layout")
    return [_part(parameter, layout) for parameter, layout in zip(parameters, layouts, strict=True)]


def _part(parameter: torch.Tensor, layout: Layout | None) -> GradPart:
    grad = parameter.grad
    local = local_of(grad) if isinstance(grad, DTensor) else grad
    counted = local
    if isinstance(grad, DTensor) and layout is not None and grad.placements != layout.placements:
        counted = local_of(grad.redistribute(layout.mesh, layout.placements))
    groups = {}
    for axis in () if layout is None else layout.sharded_axes():
        group = layout.mesh.get_group(axis)  # type: ignore[union-attr]  # no axes without a layout
        groups[tuple(dist.get_process_group_ranks(group))] = group
    return GradPart(local, counted, parameter.device, parameter.dtype, groups)


def _norm(parts: list[GradPart], norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
    norm_type = float(norm_type)
    if norm_type == 0.0 or math.isnan(norm_type):
        raise ValueError(f"norm_type must be a number other than 0, found {norm_type}")
    if not parts:
        return torch.tensor(0.0)
    totals = _reduced(_sums(parts, norm_type, foreach), parts, norm_type)
    total = totals[0] if len(totals) == 1 else _fold(torch.stack(totals), norm_type)
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale them by it all the same"
        )
    return total


def _sums(
    parts: list[GradPart], norm_type: float, foreach: bool | None
) -> dict[tuple[tuple[int, ...], ...], torch.Tensor]:
    """Sum of ``|g|**p`` (largest ``|g|`` for infinity), one number for each set of groups that gradients are sharded
    over.
    """
    device = parts[0].device
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    nothing = math.inf if norm_type == -math.inf else 0.0
    by_groups: dict[tuple[tuple[int, ...], ...], list[torch.Tensor]] = {}
    for part in parts:
        held = by_groups.setdefault(tuple(sorted(part.groups)), [])
        if part.counted is not None and part.counted.numel():
            held.append(part.counted)
    sums = {}
    for groups, grads in by_groups.items():
        norms = _norms(grads, norm_type, dtype, device, foreach)
        powers = [norm if math.isinf(norm_type) else norm**norm_type for norm in norms]
        sums[groups] = (
            _fold(torch.stack(powers), norm_type) if powers else torch.full((), nothing, dtype=dtype, device=device)
        )
    return sums


def _norms(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device, foreach: bool | None
) -> list[torch.Tensor]:
    norms: list[torch.Tensor] = []
    for group in _by_device(grads).values():
        if _use_foreach(group, foreach):
            found = foreach_norms(group, norm_type, dtype)
        else:
            found = [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in group]
        norms += [norm.to(device) for norm in found]
    return norms


def _fold(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    if math.isinf(norm_type):
        return values.max() if norm_type > 0 else values.min()
    return values.sum()


def _reduced(
    sums: dict[tuple[tuple[int, ...], ...], torch.Tensor], parts: list[GradPart], norm_type: float
) -> list[torch.Tensor]:
    """Add the sums of the other ranks, group by group."""
    groups = {ranks: group for part in parts for ranks, group in part.groups.items()}
    operation = dist.ReduceOp.SUM
    if math.isinf(norm_type):
        operation = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    for ranks in groups:  # in the order of the parameters and of their mesh's axes, which is the same on all ranks
        concerned = [key for key in sums if ranks in key]
        if len(groups) == 1 and () in sums:
            # What all ranks hold whole is taken from the first: replicas that differ in a bit still get one norm.
            concerned.append(())
            if operation == dist.ReduceOp.SUM and dist.get_rank() != ranks[0]:
                sums[()] = torch.zeros_like(sums[()])
        stacked = torch.stack([sums[key] for key in concerned])
        dist.all_reduce(stacked, op=operation, group=groups[ranks])
        sums.update(zip(concerned, stacked.unbind(), strict=True))
    return list(sums.values())


def _by_device(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _use_foreach(tensors: list[torch.Tensor], foreach: bool | None) -> bool:
    return foreach if foreach is not None else tensors[0].device.type in ("cpu", "cuda")
