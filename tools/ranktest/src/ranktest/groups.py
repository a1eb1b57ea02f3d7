"""Joins the process group of one test."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ranktest import _torch_compat as compat
from ranktest import supervise
from ranktest.job import Job, Meeting


def join(job: Job, meeting: Meeting) -> torch.device:
    """Make the default group of a test and return this rank's device; an accelerator is made current first."""
    on_cpu, index = job.placement.device == "cpu", meeting.rank // job.placement.ranks_per_gpu
    device = torch.device("cpu") if on_cpu else torch.device(job.placement.device, index)
    os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(device.index or 0))
    bound = None
    if device.type == "cuda":
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # for NCCL 2.30: several ranks on one device
        compat.use_cuda(device)
        bound = device if "nccl" in job.placement.backend else None
    # A collective waits for a busy rank, or for one in a debugger, as long as the test may take.
    timeout = timedelta(seconds=supervise.LIMIT_S)
    store = compat.TCPStore(
        "127.0.0.1",
        meeting.port,
        job.world_size,
        meeting.listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=meeting.listen_fd,
    )
    dist.init_process_group(
        job.placement.backend,
        store=store,
        rank=meeting.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=bound,
    )
    return device
