"""Random numbers of a step: a stream of its own, the same on every rank or one per rank."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.consensus import all_gather_objects
from dp_partition._torch_compat import pytree
from dp_partition.mesh import flat_rank


class Stream:
    """A random stream that a step draws from; the caller's generators are left as they are.

    Args:
        mesh: The data-parallel ranks; rank 0's seed starts all streams.
        mode: ``"same"``: every rank draws the same numbers; ``"per_rank"``: every rank its own.
    """

    def __init__(self, mesh: DeviceMesh, mode: str) -> None:
        seed = torch.initial_seed() % (1 << 62)
        if mesh.size() > 1:
            seed = all_gather_objects(mesh, seed, "the seed of a step's random stream")[0]
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


class RandomState:
    """All generators that a step may draw from: torch's, Python's, NumPy's, those passed to it, the step's stream.

    Args:
        arguments: The step's arguments; generators among them count.
        stream: The step's own stream.
    """

    def __init__(self, arguments: Any, stream: Stream | None) -> None:
        self.stream = stream
        self.generators = [g for g in pytree.tree_leaves(arguments) if isinstance(g, torch.Generator)]
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self.passed = [generator.get_state() for generator in self.generators]
        self.python = random.getstate()
        numpy: Any = sys.modules.get("numpy")  # a program that never imported it draws nothing from it
        self.numpy = numpy.random.get_state() if numpy is not None else None
        self.own = (stream.cpu_state, stream.cuda_state) if stream is not None else None

    def equals(self, other: RandomState) -> bool:
        """Return whether generators stand alike; those of a GPU count by kernels, which may differ."""
        # Those that were passed do not count: a copy of the step draws from copies of them.
        same = torch.equal(self.cpu, other.cpu) and self.python == other.python
        if self.own is not None and other.own is not None:
            same = same and torch.equal(self.own[0], other.own[0])
        return same and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)  # which holds an array

    def restore(self) -> None:
        """Put all generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in zip(self.generators, self.passed, strict=True):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.stream is not None and self.own is not None:
            self.stream.cpu_state, self.stream.cuda_state = self.own
