"""Settings of a run, claims, process groups of one rank, and timers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

GIB = 2**30
NCCL_MULTI_RANK = (2, 30)


Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        dry: On the CPU, with small sizes.
        ranks: Ranks per GPU in the multi-rank suites.
        keyword: Passed to the suites' pytest as `-k`.
    """

    dry: bool
    ranks: int
    keyword: str

    @property
    def device(self) -> str:
        """Where tensors are made."""
        return "cpu" if self.dry else "cuda:0"


def claim(what: str, found: float, wanted: str, holds: bool) -> Result:
    """One number that was promised, and what it came to."""
    return {"what": what, "found": round(found, 4), "wanted": wanted, "holds": bool(holds)}


@contextmanager
def one_rank(settings: Settings) -> Iterator[None]:
    """A default group of one rank: NCCL on the GPU, gloo in a dry run."""
    import torch
    import torch.distributed as dist

    device = None if settings.dry else torch.device(settings.device)
    if device is not None:
        torch.cuda.set_device(device)
    backend = "gloo" if settings.dry else "nccl"
    dist.init_process_group(backend, store=hash_store(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hash_store() -> Any:
    """A store within this process."""
    import torch.distributed as dist

    module: Any = dist
    return module.HashStore()


@contextmanager
def no_host_waits(settings: Settings) -> Iterator[None]:
    """Make torch raise where the host would wait for the device."""
    import torch

    if settings.dry:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded."""
    import torch

    nccl: Any = torch.cuda.nccl
    return tuple(nccl.version())


def timed(call: Callable[[], object], settings: Settings) -> float:
    """Seconds of one call: the median of several, after two that do not count."""
    import torch

    event: Any = torch.cuda.Event
    times = []
    for at in range(4 if settings.dry else 22):
        if settings.dry:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        else:
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        if at >= 2:
            times.append(seconds)
    return sorted(times)[len(times) // 2]


def peak_of(call: Callable[[], object], settings: Settings) -> int:
    """Most bytes allocated during a call, beyond what was allocated before; 0 in a dry run."""
    import torch

    call()
    if settings.dry:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
