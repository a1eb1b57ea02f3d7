"""Consensus: after one small exchange all ranks go on, or all of them raise.

A rank that raised alone would leave its peers in their next collective until the group's timeout, with an error
without a name. So a rank with an error still takes part in the exchange, and only then raises. The first message
has the same length on every rank, in any call: ranks in different calls then read each other's subject instead
of misreading each other's bytes (gloo ends the process when lengths differ).
"""

from __future__ import annotations

import collections
import functools
import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .problems import PlanError, Problem

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Where: TypeAlias = dist.ProcessGroup | DeviceMesh | None  # None: the default group

HEADER_BYTES = 64


def ranks_of(where: Where) -> list[int]:
    """Return the global ranks of a group or mesh, in the order of a gather."""
    return list(where.mesh.flatten().tolist()) if isinstance(where, DeviceMesh) else dist.get_process_group_ranks(where)


def mesh_order_problems(mesh: DeviceMesh) -> list[Problem]:
    """Return axes of a mesh with another order in their process group: gathers over these permute shards silently.

    Torch makes the groups of a mesh in ascending order, for any order of its ranks.
    """
    problems = []
    for axis, along in enumerate(_ranks_along(mesh)):
        members = dist.get_process_group_ranks(mesh.get_group(axis))
        if list(along) != members:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            reason = f"ranks {list(along)} along the axis, {members} in its process group"
            hint = "torch gathers in the order of the group: use ascending ranks, or DeviceMesh.from_group"
            problems.append(Problem("mesh-mismatch", "mesh", axis=name, found=reason, hint=hint))
    return problems


@functools.lru_cache(maxsize=64)
def _ranks_along(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """Return the ranks along each axis through this rank. None on a rank outside of the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = [tuple(slice(None) if at == axis else x for at, x in enumerate(coordinate)) for axis in range(mesh.ndim)]
    return tuple(tuple(mesh.mesh[along].tolist()) for along in index)


NOTHING_CHANGED = "nothing was changed on any rank"
_COMPARING = "got no answer while ranks compared what they are about to do,"


def all_gather_header(where: Where, payload: bytes, subject: str, state: str = NOTHING_CHANGED) -> list[bytes]:
    """Gather a short message of every rank; a collective.

    Args:
        where: A group, or a mesh of any number of axes. A mesh is gathered one axis after the other, the last one
            first, so no group of all its ranks has to be made.
        payload: At most 64 bytes; padded with zeros.
        subject: The call, for the error if a peer died.
        state: Text on the caller's tensors for that error.

    Returns:
        The payloads of all ranks, in the order of `ranks_of`.

    Raises:
        RuntimeError: A peer died, or never made this call; names the call and this rank.
    """
    assert len(payload) <= HEADER_BYTES
    rows = torch.tensor([list(payload.ljust(HEADER_BYTES, b"\0"))], dtype=torch.uint8, device="cpu")  # 1 x 64
    for group in _groups(where):
        mine = rows.to(message_device(group))
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        with named_collective(subject, state, _COMPARING):
            dist.all_gather(gathered, mine, group=group)
        rows = torch.cat(gathered).cpu()  # ranks so far x 64
    return [bytes(row) for row in rows.tolist()]


def all_gather_objects(where: Where, value: Any, subject: str) -> list[Any]:
    """Gather a picklable object of every rank, in the order of `ranks_of`; a collective.

    Raises:
        RuntimeError: A peer died, or never made this call.
    """
    values = [value]
    for group in _groups(where):
        rows: list[Any] = [None] * dist.get_world_size(group)
        with named_collective(subject, NOTHING_CHANGED, _COMPARING):
            dist.all_gather_object(rows, values, group=group)
        values = [one for row in rows for one in row]  # row-major, axis by axis
    return values


SMALL_BYTES = 504


def all_gather_small(group: dist.ProcessGroup, value: Any, subject: str) -> list[Any]:
    """Gather a picklable object of every rank in one message, or in two where one needs more than `SMALL_BYTES`.

    ``all_gather_object`` always sends two, and ranks that share a core wait longer for each other than for the bytes.

    Raises:
        RuntimeError: A peer died, or never made this call.
    """
    device, data = message_device(group), pickle.dumps(value)
    head = len(data).to_bytes(8, "little") + data[:SMALL_BYTES].ljust(SMALL_BYTES, b"\0")
    with named_collective(subject, NOTHING_CHANGED, _COMPARING):
        rows = _gathered_bytes(head, group, device)
        sizes = [int.from_bytes(row[:8], "little") for row in rows]
        rows = [row[8:] for row in rows]
        if max(sizes) > SMALL_BYTES:
            rest = _gathered_bytes(data[SMALL_BYTES:].ljust(max(sizes) - SMALL_BYTES, b"\0"), group, device)
            rows = [first + more for first, more in zip(rows, rest, strict=True)]
    # Bytes of this job's own ranks, as torch's `all_gather_object` reads them.
    return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]  # noqa: S301


def _gathered_bytes(data: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [bytes(row.tolist()) for row in rows]


def capture_errors(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``work`` and return its value or its error: a failing rank still meets its peers."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def assert_consistent(
    where: Where,
    subject: str,
    lines: Sequence[str] = (),
    error: Exception | None = None,
    *,
    hint: str = "pass the same model, plan and arguments on every rank",
    state: str = NOTHING_CHANGED,
) -> None:
    """Return on every rank, or raise on every rank; a collective.

    Consistent ranks exchange 64 bytes. Only if one failed, or lines differ, are the lines themselves gathered.

    Args:
        where: The ranks to compare; all of them call this.
        subject: The call, for messages.
        lines: Metadata to be equal on every rank, one a line.
        error: This rank's error, if any.
        hint: Remedy for different lines.
        state: Text on the caller's tensors for errors.

    Raises:
        Exception: ``error``, on the rank that passed it, if it is no plain ``PlanError``.
        PlanError: On every other rank: the problems of all ranks, or ``ranks-disagree`` with the different lines.
        RuntimeError: A peer died.
    """
    digest = hashlib.sha256("\n".join((subject, *lines)).encode()).digest()  # with the subject: other calls differ
    headers = all_gather_header(where, bytes([error is not None]) + digest, subject, state)
    if len(set(headers)) > 1 or error is not None:
        raise_joined(where, subject, lines, error, hint=hint, state=state)


def raise_joined(
    where: Where,
    subject: str,
    lines: Sequence[str] = (),
    error: Exception | None = None,
    *,
    hint: str = "pass the same model, plan and arguments on every rank",
    state: str = NOTHING_CHANGED,
) -> NoReturn:
    """Raise the errors of any rank on every rank. A collective, after different headers, or one with an error."""
    ranks = ranks_of(where)
    problems = () if error is None else problems_of(error)
    states = all_gather_objects(where, (subject, tuple(lines), problems), subject)
    subject = states[0][0]  # of the first rank, if ranks make different calls: all raise one text
    failures = joined_problems({rank: entry[2] for rank, entry in zip(ranks, states, strict=True)})
    if error is not None and type(error) is not PlanError:
        raise error  # its own type and traceback; peers raise its text
    if failures:
        raise PlanError(failures, f"{subject}: {state}")
    differences = differing_lines({rank: [entry[0], *entry[1]] for rank, entry in zip(ranks, states, strict=True)})
    problems = tuple(Problem("ranks-disagree", subject, found=text, hint=hint) for text in differences)
    raise PlanError(problems, f"{subject}: the ranks disagree, {state}")


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """Return an error as problems for peers to raise."""
    if isinstance(error, PlanError):
        return error.problems
    text = (str(error).splitlines() or [""])[0]
    return (Problem("rank-failed", found=f"{type(error).__name__}: {text}", hint="see the traceback of that rank"),)


def joined_problems(by_rank: dict[int, Sequence[Problem]]) -> list[Problem]:
    """Return each problem once, with its ranks if not all have it."""
    holders: dict[Problem, list[int]] = {}
    for rank, problems in by_rank.items():
        for problem in dict.fromkeys(problems):
            holders.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == len(by_rank) else replace(problem, found=f"on {_ranks_text(ranks)}: {problem.found}")
        for problem, ranks in holders.items()
    ]


def differing_lines(by_rank: dict[int, Sequence[str]], limit: int = 5) -> list[str]:
    """Return the first lines that are not equal on all ranks, each with its ranks."""
    length = max(map(len, by_rank.values()))
    texts: list[str] = []
    for at in range(length):
        holders: dict[str, list[int]] = {}
        for rank, lines in by_rank.items():
            holders.setdefault(lines[at] if at < len(lines) else "nothing", []).append(rank)
        if len(holders) > 1 and len(texts) < limit:
            texts.append("; ".join(f"{_ranks_text(ranks)}: {line}" for line, ranks in holders.items()))
    return texts


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _groups(where: Where) -> list[dist.ProcessGroup | None]:
    if isinstance(where, DeviceMesh):
        # The last axis first: rows then lie in row-major order of the mesh, as in `mesh.flatten()`.
        return [where.get_group(axis) for axis in reversed(range(where.ndim))]
    return [where]


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the group has a CPU backend, else its current GPU: CPU messages need no stream sync."""
    devices = device_types(dist.get_backend_config(group))
    if "cpu" in devices or "cuda" not in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def device_types(backends: str) -> frozenset[str]:
    """Return the device types of a group's backend configuration. Parsing costs more than a lookup."""
    return frozenset(map(str, dist.BackendConfig(dist.Backend(backends)).get_device_backend_map()))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in row-major order, 1-D: backends lack complex numbers and 16-bit integers.

    A contiguous tensor shares its memory with the result, so a collective may write to it.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


_WORDS = 1 << 17  # 64-bit words that are hashed at a time: 1 MiB stays in a core's cache
_ODD, _FACTOR = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D  # odd, so that products lose no bit


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return two int64 numbers, on the tensor's device, that depend on each bit and its place.

    Equal values give equal hashes on any device and in any strides. A NaN counts by its payload, and -0.0 differs from
    0.0. Ranks compare these 16 bytes in place of the values.

    Two tensors that differ in one word of 8 bytes always have different hashes: each step below is a bijection of that
    word. Any other two collide by chance, as with 128 random bits. Shape and dtype do not count, the number of bytes
    does: compare them beside the hash.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    total = torch.full((2,), data.numel(), dtype=torch.int64, device=data.device)
    keys = (torch.arange(min(_WORDS, -(-data.numel() // 8)), device=data.device) * 2 + 1) * _ODD
    for part in torch.split(data, 8 * _WORDS):
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))  # a copy, aligned
        words = part.view(torch.int64)
        key = keys[: words.numel()]
        mixed = words + key
        low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
        low ^= high  # the highest bits (signs) reach the product too
        mixed *= _FACTOR
        low ^= high
        total = total * _FACTOR + torch.stack([mixed.sum(), mixed.mul_(key).sum()])
    return total


def tensor_hashes(tensors: Mapping[K, torch.Tensor]) -> dict[K, tuple[int, int]]:
    """Return the hash of each tensor, by one transfer from each device."""
    rows = {key: tensor_hash(tensor) for key, tensor in tensors.items()}
    hashes: dict[K, tuple[int, int]] = {}
    for device in {row.device for row in rows.values()}:
        here = {key: row for key, row in rows.items() if row.device == device}
        values = torch.stack(list(here.values())).tolist()
        hashes.update({key: (first, second) for key, (first, second) in zip(here, values, strict=True)})
    return {key: hashes[key] for key in rows}


_calls: collections.Counter[str] = collections.Counter()


@contextmanager
def named_collective(
    subject: str,
    state: str = "gradients and parameters may be partially updated: restore from a checkpoint",
    failed: str = "failed",
) -> Iterator[None]:
    """Name rank and call of a collective that fails without a peer."""
    _calls[subject] += 1
    try:
        yield
    except RuntimeError as error:
        call = f"{subject}, call {_calls[subject]}, {failed} on rank {dist.get_rank()}"
        raise RuntimeError(f"{call}: another rank died, or made no such call; {state}") from error
