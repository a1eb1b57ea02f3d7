"""Random numbers of dropout: different on each rank inside sharded regions, equal outside of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def tp_rng(mesh: DeviceMesh, device: torch.device | str | None = None) -> Iterator[None]:
    """Draw random numbers inside from the rank and the default generator's state at entry.

    Masks over shards differ from rank to rank, and are the same again when activation checkpointing restores the
    default generator and repeats the region. Outside, the default generator continues equally on every rank, however
    many numbers each has drawn inside.

    Args:
        mesh: 1-D tensor-parallel mesh.
        device: Device of the default generator; by default the mesh's device type on this rank.
    """
    device = torch.device(device if device is not None else mesh.device_type)
    outside = enter_region(mesh.get_local_rank(), device)
    try:
        yield
    finally:
        leave_region(outside, device)


def enter_region(rank: int, device: torch.device) -> torch.Tensor:
    """Make the default generator rank-specific; return the state for `leave_region`."""
    generator = default_generator(device)
    mixed = hashlib.blake2b(f"{_drawn_seed(generator)} {rank}".encode(), digest_size=8).digest()
    outside = generator.get_state()
    generator.manual_seed(int.from_bytes(mixed, "little") >> 2)  # never negative
    return outside


def leave_region(outside: torch.Tensor, device: torch.device) -> None:
    """Restore the default generator's state of all ranks."""
    default_generator(device).set_state(outside)


def default_generator(device: torch.device) -> torch.Generator:
    """Return dropout's generator on this device."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch, device.type).default_generators
    index: int | None = device.index  # None for "this rank's"
    index = getattr(torch, device.type).current_device() if index is None else index
    generator: torch.Generator = generators[index]
    return generator


def _drawn_seed(generator: torch.Generator) -> str:
    """Return a function of the generator's state alone, and advance it; no device is waited for."""
    if generator.device.type == "cpu":
        return str(torch.randint(2**62, (), generator=generator).item())
    offset = generator.get_offset()
    seed = f"{generator.initial_seed()} {offset}"
    generator.set_offset(offset + 4)  # offsets of CUDA generators are multiples of four
    return seed
