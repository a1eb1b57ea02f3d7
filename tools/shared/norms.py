"""Gradient norms over parameters of every kind and mesh: plain tensors, local shards, DTensors.

Every element counts once, on any number of ranks, and the norm is bit-equal on all ranks of a mesh. A rank's
summand follows from the parameter alone (its placements and sections), never from the gradient (a rank may lack it): so
all ranks make the same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from ._torch_compat import foreach_norms, foreach_scale, local_of
from .consensus import named_collective
from .problems import Problem, own_errors, raise_problems
from .sharding_info import sharding_info_of

Axis = tuple[int, ...]
"""A mesh axis as the global ranks of this rank's group: meshes that share an axis have the same tuple."""

BRIDGED = "_bridge"
"""Attribute of a module that tp-ddp-bridge has bridged, and of its parameters; local shards of others have none."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place to a common norm of at most ``max_norm``; torch's signature.

    Args:
        parameters: As in ``grad_norm``.
        max_norm: Largest norm without a change.
        norm_type: As in ``grad_norm``.
        error_if_nonfinite: As in ``grad_norm``.
        foreach: Accepted as in torch; multi-tensor kernels fall back by themselves on a device without them.

    Returns:
        The norm before clipping, a plain 0-dim tensor, equal on all ranks.

    Raises:
        PlanError: As ``grad_norm``.
        RuntimeError: As ``grad_norm``.
    """
    unique = _unique(parameters)
    total = grad_norm(unique, norm_type, error_if_nonfinite)
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)  # stays on its device: no synchronization
    gradients = [_local(parameter.grad) for parameter in unique if parameter.grad is not None]
    for batch in _by_kind(gradients):
        foreach_scale(batch, factor.to(batch[0].device))
    return total


@torch.no_grad()
@own_errors()  # for gradients of parameters marked as stale by another package
def grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Return the norm of all gradients together, as in one process with the full model.

    One scalar is reduced over each axis of each mesh; a mesh with all its axes in a larger one (`mesh["tp"]` beside
    FSDP2's `mesh["dp", "tp"]`) shares that mesh's reductions. Plain tensors alone communicate nothing.

    Args:
        parameters: Plain tensors, local shards and DTensors in any mix, on any meshes, in the same order on every rank;
            duplicates count once.
        norm_type: Order of the norm, above 0; also ``math.inf``.
        error_if_nonfinite: Raise if the norm is not finite (on all ranks alike).

    Returns:
        A plain 0-dim tensor, equal on all ranks.

    Raises:
        PlanError: A gradient is a partial sum, the order is not above 0, or a parameter has an unknown layout
            beside those of a bridged module.
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``; or another rank died.
    """
    unique, order = _unique(parameters), float(norm_type)
    _check(unique, order)
    if not unique:
        return torch.zeros(())
    device, dtype = unique[0].device, torch.float32
    for parameter in unique:  # not of gradients: a rank may lack them
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())

    # Gradients of one layout are summed together; the carrier is the mesh of the reduction.
    meshes = _Meshes()
    layouts: dict[tuple[frozenset[Axis], frozenset[Axis]], list[torch.Tensor]] = {}
    for parameter in unique:
        layouts.setdefault(meshes.layout(parameter), []).extend(_counted(parameter))
    sums: dict[frozenset[Axis], list[torch.Tensor]] = {}
    for (axes, sharded), gradients in layouts.items():
        carrier = meshes.carrier(axes)
        # Of the ranks that hold equal elements only the first of each axis contributes. So all ranks add the same
        # numbers, and get the same bits, also where replicas differ by rounding.
        is_first = all(dist.get_rank() == axis[0] for axis in carrier - sharded)
        terms = _powers(gradients, order) if is_first else []
        sums.setdefault(carrier, []).append(_combined([term.to(device, dtype) for term in terms], order, device, dtype))

    # Every rank goes through carriers and axes in the order of the parameters: an order by rank numbers would start
    # with different axes on ranks 0 and 3 of a 2 x 2 mesh.
    op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    totals = []
    for carrier, values in sums.items():
        total = _combined(values, order, device, dtype)
        for axis, group in meshes.groups.items():
            if axis in carrier:
                with named_collective("grad_norm"):
                    dist.all_reduce(total, op=op, group=group)
        totals.append(total)
    norm = _combined(totals, order, device, dtype)
    norm = norm if math.isinf(order) else norm ** (1.0 / order)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is non-finite ({norm.item()}), so they cannot be clipped;"
            " pass error_if_nonfinite=False to scale them by it all the same"
        )
    return norm


class _Meshes:
    """Axes of all meshes of a list of parameters, in their order of appearance."""

    def __init__(self) -> None:
        self.groups: dict[Axis, dist.ProcessGroup] = {}
        self.known: dict[int, tuple[DeviceMesh, tuple[Axis | None, ...]]] = {}  # the mesh too: keys are ids
        self.carriers: dict[frozenset[Axis], None] = {}

    def layout(self, parameter: torch.Tensor) -> tuple[frozenset[Axis], frozenset[Axis]]:
        """Return all axes of a parameter's mesh, and those along which elements differ. None for a plain tensor."""
        placed = _placed(parameter)
        if placed is None:
            return frozenset(), frozenset()
        mesh, placements = placed
        axes = self._axes(mesh)
        # Every placement other than a replica is a shard here: `_StridedShard` (TP beside FSDP2) is no `Shard`.
        sharded = [a for a, p in zip(axes, placements, strict=True) if a is not None and not p.is_replicate()]
        return frozenset(a for a in axes if a is not None), frozenset(sharded)

    def _axes(self, mesh: DeviceMesh) -> tuple[Axis | None, ...]:
        if id(mesh) not in self.known:
            axes: list[Axis | None] = [None] * mesh.ndim
            for dim in (dim for dim in range(mesh.ndim) if mesh.size(dim) > 1):
                group = mesh.get_group(dim)
                axes[dim] = axis = tuple(dist.get_process_group_ranks(group))
                self.groups.setdefault(axis, group)
            self.known[id(mesh)] = mesh, tuple(axes)
            self.carriers.setdefault(frozenset(axis for axis in axes if axis is not None))
        return self.known[id(mesh)][1]

    def carrier(self, axes: frozenset[Axis]) -> frozenset[Axis]:
        """Return the axes of the largest mesh with all of ``axes``."""
        return max((mesh for mesh in (*self.carriers, axes) if mesh >= axes), key=len)


def _unique(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return list({id(parameter): parameter for parameter in listed}.values())


def _placed(parameter: torch.Tensor) -> tuple[DeviceMesh, Sequence[Placement]] | None:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    info = sharding_info_of(parameter)
    return None if info is None else (info.mesh, info.placements)


def _check(parameters: list[torch.Tensor], order: float) -> None:
    problems = []
    if not order > 0:
        hint = "orders above 0, and inf, can be combined"
        problems.append(Problem("invalid-argument", "norm_type", found=str(order), hint=hint))
    is_bridged = any(BRIDGED in parameter.__dict__ for parameter in parameters)
    for index, parameter in enumerate(parameters):
        if isinstance(parameter.grad, DTensor) and any(isinstance(p, Partial) for p in parameter.grad.placements):
            reason, hint = f"parameter {index}: {parameter.grad.placements}", "reduce it before clipping"
            problems.append(Problem("partial-gradient", found=reason, hint=hint))
        # Without a bridge a plain parameter beside sharded ones is replicated, as everywhere in tensor parallelism.
        if is_bridged and _placed(parameter) is None:
            name, reason = f"parameter {index} of shape {tuple(parameter.shape)}", "a plain tensor among bridged ones"
            hint = "is it replicated or a shard? bridge the module it belongs to, or set its _sharding_info"
            problems.append(Problem("invalid-layout", name, found=reason, hint=hint))
    raise_problems(problems)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return the memory of a gradient as a plain tensor."""
    return local_of(gradient) if isinstance(gradient, DTensor) else gradient.detach()


def _counted(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of a gradient counted by this rank. Copies of a section: the first rank's."""
    gradient, placed = parameter.grad, _placed(parameter)
    if gradient is None:
        return []
    if isinstance(gradient, DTensor) and placed is not None and tuple(gradient.placements) != tuple(placed[1]):
        gradient = gradient.redistribute(*placed)  # its parameter's layout decides
    local = _local(gradient)
    info = sharding_info_of(parameter)
    if info is None or not info.needs_sections:
        return [local]
    axis, dim = info.section_axis()
    rank, offset, ranges = info.mesh.get_local_rank(axis), 0, []
    for section, (start, stop) in zip(info.sections, info.ranges(rank), strict=True):
        if rank % section.copies == 0:
            ranges.append(local.narrow(dim, offset, stop - start))
        offset += stop - start
    return ranges


def _powers(gradients: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the sum of ``|g|**order`` of each gradient, or its largest ``|g|``."""
    filled = [gradient.abs() if gradient.is_complex() else gradient for gradient in gradients if gradient.numel()]
    norms: list[torch.Tensor] = []
    for batch in _by_kind(filled):
        dtype = torch.promote_types(torch.float32, batch[0].dtype)
        norms += foreach_norms(batch, order, dtype)
    return norms if math.isinf(order) else [norm**order for norm in norms]


def _combined(values: list[torch.Tensor], order: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not values:
        return torch.zeros((), device=device, dtype=dtype)
    stacked = torch.stack(values)
    return stacked.max() if math.isinf(order) else stacked.sum()


def _by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors in batches of one device and dtype, for multi-tensor kernels."""
    batches: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        batches.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(batches.values())
