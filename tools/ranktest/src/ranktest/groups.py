"""Joining and leaving the process group of one test."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ranktest import _torch_compat as compat


def join(rank: int, world_size: int, port: int, listen_fd: int | None, timeout_s: float) -> None:
    """Make the default group of a test over a store on the loopback; rank 0 serves it on an already open socket."""
    timeout = timedelta(seconds=timeout_s)
    store = compat.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
