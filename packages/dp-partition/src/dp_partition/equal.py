"""Ranks start with the same values: rank 0's are sent to all, or whoever holds others is named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_partition.axes import all_groups, gather_objects
from dp_partition.problems import PlanError, Problem


def broadcast_from_first(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Rank 0's values of all tensors, a few large messages per dtype; the tensors passed are left alone."""
    result: dict[str, torch.Tensor] = {}
    buckets: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        buckets.setdefault((tensor.dtype, tensor.device), []).append(name)
    groups = all_groups(mesh)
    backend_device = _group_device(groups[0])
    for names in buckets.values():
        for part in _by_bytes(names, tensors):
            flat = torch.cat([tensors[name].reshape(-1) for name in part])
            travelling = flat.to(backend_device) if backend_device.type != flat.device.type else flat
            for group in groups:
                dist.broadcast(travelling, group=group, group_src=0)
            flat = travelling.to(flat.device)
            pieces = torch.split(flat, [tensors[name].numel() for name in part])
            for name, piece in zip(part, pieces, strict=True):
                result[name] = torch.empty_like(tensors[name]).copy_(piece.view(tensors[name].shape))
    return result


def _by_bytes(names: list[str], tensors: dict[str, torch.Tensor], limit: int = 64 << 20) -> Iterable[list[str]]:
    part: list[str] = []
    size = 0
    for name in names:
        part.append(name)
        size += tensors[name].numel() * tensors[name].element_size()
        if size >= limit:
            yield part
            part, size = [], 0
    if part:
        yield part


def _group_device(group: dist.ProcessGroup) -> torch.device:
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0])


def check_equal(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Raise on every rank if any tensor differs from rank 0's."""
    reference = broadcast_from_first(tensors, mesh)
    differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, reference[name])]
    gathered = gather_objects(mesh, differing)
    problems = [
        Problem(
            "ranks-differ",
            name.replace("\0", " "),
            found=f"rank {rank} does not hold rank 0's values",
            hint="seed every rank alike, or use equal='broadcast'",
        )
        for rank, names in enumerate(gathered)
        for name in names
    ]
    if problems:
        raise PlanError(problems, "the ranks start with different values")


__all__ = ["broadcast_from_first", "check_equal"]
