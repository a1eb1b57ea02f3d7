"""Random numbers of a step: a stream of its own, the same on every rank or one per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from dp_partition.axes import first_ranks, flat_rank


class Stream:
    """A random stream that a step draws from; the caller's generators are left as they are.

    Args:
        mesh: The data-parallel ranks; rank 0's seed starts all streams.
        mode: ``"same"``: every rank draws the same numbers; ``"per_rank"``: every rank its own.
    """

    def __init__(self, mesh: DeviceMesh, mode: str) -> None:
        seed: int = first_ranks(mesh, torch.initial_seed() % (1 << 62))
        offset = flat_rank(mesh) if mode == "per_rank" else 0
        self.cuda = mesh.device_type == "cuda"
        with self._restored():
            torch.manual_seed(seed + offset)
            self._save()

    def _save(self) -> None:
        self.cpu_state = torch.get_rng_state()
        self.cuda_state = torch.cuda.get_rng_state() if self.cuda else None

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if self.cuda else []):
            yield

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the block torch's default generators continue this stream."""
        with self._restored():
            torch.set_rng_state(self.cpu_state)
            if self.cuda_state is not None:
                torch.cuda.set_rng_state(self.cuda_state)
            yield
            self._save()
