"""Consensus: ranks adopt a program together, or all refuse a failed or different one.

A rank that raised alone would leave the others in their first collective until the group's timeout; ranks with
different collectives could fill each other's tensors with values for others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dp_partition._shared.consensus import (
    all_gather_objects,
    as_bytes,
    assert_consistent,
    capture_errors,
    message_device,
    ranks_of,
    tensor_hashes,
)
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import collectives, default_store
from dp_partition.backends import gathered
from dp_partition.capture.phases import carried_names
from dp_partition.capture.tracer import user_line
from dp_partition.nodes import is_collective
from dp_partition.plan.placements import all_groups, shard_group, shard_world

T = TypeVar("T")
K = TypeVar("K")
_PATIENCE_S = 10.0  # for ranks that enter a call later than a failed one
_ANSWER_S = 5.0  # for ranks whose collective fails later than this one's
# Words of errors of backends, which have no common class.
_OF_COLLECTIVES = ("gloo", "NCCL", "Timed out waiting", "another rank died", "Connection closed", "Connection reset")

HINT = (
    "run the same step on every rank, with the same model and the same arguments of compile; under global semantics "
    "every rank passes as many rows; where batches differ in size, pass reshard_after_forward=True or False"
)


def collectives_digest(graph: fx.Graph) -> str:
    """Return a digest of a graph's collectives with carried names, each once: where a rank pads, one has two nodes."""
    lines = []
    for node in filter(is_collective, graph.nodes):
        names = dict.fromkeys(name for source in node.all_input_nodes for name in carried_names(source))
        lines.append(f"{node.target} {' '.join(names)}")
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
    largest = torch.tensor(value, device=message_device(groups[0]))
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


def is_of_collective(error: Exception) -> bool:
    """Return True for the error of a collective that a peer has left, or never entered."""
    return any(word in str(error) for word in _OF_COLLECTIVES) and not isinstance(error, PlanError)


def raise_naming_peers(error: Exception, token: str, mesh: DeviceMesh, subject: str) -> None:
    """Tell peers, through the store, how this rank's call has ended; raise with theirs if a collective has failed.

    A rank that waits for a peer gets an error of the backend, without a rank: the peer may have died, raised, or gone
    to another collective, whose error it then tells.

    Args:
        error: The error of this rank's call; it is not raised here if it is no collective's.
        token: Text for the step, common to its ranks; empty if there is none.
        mesh: The ranks.
        subject: Call, step and this rank.

    Raises:
        RuntimeError: Call, rank, and what is known of every peer, in the first line.
    """
    text = f"{type(error).__name__}: {error}"
    store = default_store() if token else None
    if store is None or mesh.size() == 1:
        return
    own = dist.get_rank()
    is_waiting = is_of_collective(error)
    where = user_line(error)
    waits = f"waits for other ranks{where or ' at its end'}"
    state = waits if is_waiting else f"has raised {text.splitlines()[0][:200]}{where}"
    peers = {rank: f"{token}/end/{rank}" for rank in ranks_of(mesh) if rank != own}
    try:
        store.set(f"{token}/end/{own}", f"rank {own} {state} in {subject}")
        until = time.monotonic() + _ANSWER_S * is_waiting
        while not store.check(list(peers.values())) and time.monotonic() < until:
            time.sleep(0.05)
        heard = {rank: store.get(key).decode() for rank, key in peers.items() if store.check([key])}
    except RuntimeError:  # rank 0, which has the store, has died
        heard = {}
    if is_waiting:
        lines = [heard.get(rank, f"rank {rank} is absent: it has died, or waits elsewhere") for rank in peers]
        shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} ranks more" if len(lines) > 4 else "")
        hint = "parameters and state may be of different calls: load a checkpoint"
        raise RuntimeError(f"{subject}: no answer in a collective: {shown}; {hint}") from error


def copy_from_first(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Write rank 0's values into tensors of every rank, by few large messages; a collective.

    Sparse tensors stay as they are: the callers compare them. An expanded tensor is sent without its repetitions.
    """
    groups = all_groups(mesh) if mesh.size() > 1 else []
    dense = {n: distinct(t.detach()) for n, t in enumerate(tensors) if t.layout == torch.strided and groups}
    for numbers in _parts(dense):
        flat = torch.cat([as_bytes(dense[number]) for number in numbers])
        travelling = flat.to(message_device(groups[0])) if flat.device.type != message_device(groups[0]).type else flat
        for group in groups:
            dist.broadcast(travelling, group=group, group_src=0)
        sizes = [dense[number].nbytes for number in numbers]
        for number, part in zip(numbers, travelling.to(flat.device).split(sizes), strict=True):
            own = dense[number]  # a copy of the part: its place in the message need not fit the dtype
            own.copy_(part.clone().view(own.dtype).view(own.shape))


@torch.no_grad()
def full_copies(placed: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return full plain copies of tensors, in their strides, shards on dim 0 by few large messages; a collective."""
    world, shards, result = shard_world(mesh), dict[int, torch.Tensor](), list[torch.Tensor]()
    for index, tensor in enumerate(placed):
        if isinstance(tensor, DTensor) and tensor.placements[-1] == Shard(0):
            shards[index] = tensor._local_tensor
            result.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device))
        else:  # of any layout; expanded ones lose their overlap
            result.append((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone())
    chunks = {index: -(-result[index].shape[0] // world) for index in shards}  # one size; the last ones are padded
    # Ranks cut parts alike: by sizes of full tensors.
    for part in _parts({index: result[index] for index in shards}):
        padded = [result[index].new_zeros(chunks[index], *result[index].shape[1:]) for index in part]
        for index, rows in zip(part, padded, strict=True):
            rows[: shards[index].shape[0]] = shards[index]
        sizes = [rows.nbytes for rows in padded]
        full = gathered(torch.cat([as_bytes(rows) for rows in padded]), world, shard_group(mesh).group_name)
        full = collectives.wait_tensor(full).view(world, -1)
        for index, columns in zip(part, full.split(sizes, 1), strict=True):
            values = columns.clone(memory_format=torch.contiguous_format).view(-1).view(result[index].dtype)
            result[index].copy_(values.view(world * chunks[index], *result[index].shape[1:])[: result[index].shape[0]])
    return result


def compare_values(mesh: DeviceMesh, values: Mapping[str, torch.Tensor], call: int) -> None:
    """Raise on every rank unless all that have a tensor of a name have the same values; a collective.

    Raises:
        PlanError: ``ranks-diverge``, with names.
    """
    sums = tensor_hashes(values)
    rows = all_gather_objects(mesh, sums, f"the comparison of parameters in call {call}")
    joined: dict[str, Any] = {}
    names = [name for row in rows for name, value in row.items() if joined.setdefault(name, value) != value]
    if names := list(dict.fromkeys(names)):  # the same on all ranks
        reason = f"{len(names)} of {len(joined)} parameters differ between ranks after call {call}"
        hint = "write the same values on every rank: reduce what a rank computes from its own batch first"
        raise PlanError([Problem("ranks-diverge", name, found=reason, hint=hint) for name in names[:8]])


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the repetitions of `expand`: its view to write."""
    for dim in range(tensor.ndim if tensor.layout == torch.strided else 0):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _parts(tensors: Mapping[K, torch.Tensor], limit: int = 16 << 20) -> list[list[K]]:
    """Return keys of tensors of one device in parts of at most 16 MiB and a tensor: this bounds the flat buffers."""
    parts: list[list[K]] = []
    open_part: dict[torch.device, tuple[list[K], int]] = {}
    for key, tensor in tensors.items():
        part, size = open_part.get(tensor.device, ([], limit))
        if size >= limit:
            parts.append(part := [])
            size = 0
        part.append(key)
        open_part[tensor.device] = part, size + tensor.nbytes
    return parts
