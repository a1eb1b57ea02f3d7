"""The `ranks` fixture: what a test body knows of its ranks, and the ways to watch them."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import intercept
from ranktest.delayed import Delayed
from ranktest.recording import Log

T = TypeVar("T")


class Ranks:
    """This rank, its world, and the means to record or delay its communication.

    Attributes:
        rank: this rank's number in the default group.
        world_size: number of ranks.
        device: the device tensors of this rank belong on.
        backend: name of the default group's backend (`gloo`, `nccl`).
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, backend: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.backend = backend

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A DeviceMesh over all ranks on this rank's kind of device."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    @contextmanager
    def record(self, *, allow_empty: bool = False) -> Iterator[Log]:
        """Log every communication call of every group that is issued inside the block.

        Args:
            allow_empty: without it, leaving the block with no event raises: a test of communication that
                communicated nothing tested nothing.

        Raises:
            AssertionError: nothing was communicated and `allow_empty` is False.
        """
        log = Log()
        intercept.add(log)
        try:
            yield log
        finally:
            intercept.remove(log)
        if not log.events and not allow_empty:
            raise AssertionError(
                f"rank {self.rank} communicated nothing inside ranks.record(); "
                "if that is what the test is about, say ranks.record(allow_empty=True)"
            )

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Deliver the results of every communication call inside the block no earlier than its `wait()`.

        Raises:
            AssertionError: at `wait()`, if an input was changed or an output written in flight; at the end of the
                block, also if a handle was never waited for.
        """
        listener = Delayed(self.rank)
        intercept.add(listener)
        try:
            yield
        finally:
            intercept.remove(listener)
        listener.finish()

    @contextmanager
    def no_host_waits(self) -> Iterator[None]:
        """Raise at any call inside the block that makes the host wait for the GPU, `loss.item()` for example.

        On the CPU the block runs unchecked: `fake_cuda` finds the same calls there.
        """
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call, device included: the median of 20 calls (2 on the CPU) after two that do not count."""
        times = []
        for _ in range(22 if self.device.type == "cuda" else 4):
            self._synchronize()
            start = time.perf_counter()
            call()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median_high(times[2:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write_row(self, **row: Any) -> None:
        """Append measured values, `what="fully_shard", torch_ms=19.9` for example, to `measured.jsonl` in `$OUT`."""
        if folder := os.environ.get("OUT"):
            with open(Path(folder) / "measured.jsonl", "a") as file:
                file.write(json.dumps(row, default=str) + "\n")

    def gather(self, obj: T) -> list[T]:
        """All ranks' objects, in rank order, on every rank. Not recorded."""
        gathered: list[Any] = [None] * self.world_size
        with intercept.unobserved():
            dist.all_gather_object(gathered, obj)
        return gathered
