"""Consensus: ranks adopt a program together, or all refuse a failed or different one.

A rank that raised alone would leave the others in their first collective until the group's timeout; ranks with
different collectives could fill each other's tensors with values for others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.consensus import assert_consistent, capture_errors
from dp_partition._torch_compat import default_store
from dp_partition.analysis import carried_names
from dp_partition.nodes import is_collective
from dp_partition.plan.placements import all_groups

T = TypeVar("T")
_PATIENCE_S = 10.0  # for ranks that enter a call later than a failed one

HINT = (
    "run the same step on every rank, with the same model and the same arguments of compile; under global semantics "
    "every rank passes as many rows; where batches differ in size, pass reshard_after_forward=True or False"
)


def collectives_digest(graph: fx.Graph) -> str:
    """Return a digest of a graph's collectives with carried names, in order; no batch sizes."""
    lines = [
        f"{node.target} {' '.join(name for source in node.all_input_nodes for name in carried_names(source))}"
        for node in graph.nodes
        if is_collective(node)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def agree_on(mesh: DeviceMesh, name: str, attempt: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
    """Return the value of ``attempt`` if every rank has made it alike; a collective.

    The attempt returns a value, and metadata to be equal on every rank; it must not communicate.

    Raises:
        PlanError: On every rank, if a rank's attempt failed or metadata differ.
    """
    if mesh.size() == 1:  # no one to compare with
        return attempt()[0]
    attempted, error = capture_errors(attempt)
    lines = [] if attempted is None else [f"{key}: {value}" for key, value in attempted[1].items()]
    assert_consistent(mesh, name, lines, error, hint=HINT)
    assert attempted is not None
    return attempted[0]


def largest_of(mesh: DeviceMesh, value: int) -> int:
    """Return the largest value of all ranks; a collective of one number."""
    groups = all_groups(mesh)
    largest = torch.tensor(value, device=group_device(groups[0]))
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)


def announce(label: str, rank: int) -> None:
    """Announce this rank's trace; ``label`` is empty if ranks share none."""
    if label and (store := default_store()) is not None:
        store.set(f"{label}/{rank}", "")


def are_all_announced(label: str, ranks: list[int], *, waits: bool) -> bool:
    """Return True, on all ranks, if all announced a trace before one finished it.

    No collective: a rank may trace alone, unknown to the others. As a rule ranks enter a call within less time than a
    trace takes. The first verdict in the store holds for late ranks too.

    A failed rank waits some time for the others: it would leave them in a collective.
    """
    store = default_store() if label else None
    if store is None:
        return False
    until = time.monotonic() + _PATIENCE_S * waits
    keys, verdict = [f"{label}/{rank}" for rank in ranks], f"{label}/all"
    while not (is_complete := store.check(keys)) and not store.check([verdict]) and time.monotonic() < until:
        time.sleep(0.01)  # a store cannot wait for either of two keys
    return bool(store.compare_set(verdict, "", "yes" if is_complete else "no") == b"yes")  # the first verdict stays


def broadcast_from_first(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return rank 0's values of all tensors, by a few large messages per dtype. The given tensors stay unchanged."""
    result: dict[str, torch.Tensor] = {}
    buckets: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        buckets.setdefault((tensor.dtype, tensor.device), []).append(name)
    groups = all_groups(mesh)
    backend_device = group_device(groups[0])
    for names in buckets.values():
        parts: list[list[str]] = [[]]
        size = 0
        for name in names:  # parts of at most 64 MiB and a tensor: this bounds the flat buffer
            if size >= 64 << 20:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += tensors[name].numel() * tensors[name].element_size()
        for part in parts:
            flat = torch.cat([tensors[name].reshape(-1) for name in part])
            travelling = flat.to(backend_device) if backend_device.type != flat.device.type else flat
            for group in groups:  # as bytes: backends lack complex numbers, booleans, 16-bit integers
                dist.broadcast(travelling.view(torch.uint8), group=group, group_src=0)
            flat = travelling.to(flat.device)
            pieces = torch.split(flat, [tensors[name].numel() for name in part])
            for name, chunk in zip(part, pieces, strict=True):
                result[name] = torch.empty_like(tensors[name]).copy_(chunk.view(tensors[name].shape))
    return result


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of a group's messages, the CPU if its backend allows."""
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0])
