"""Joining the process group of one test."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ranktest import _torch_compat as compat
from ranktest.job import Job, Meeting

#: First NCCL that can put several ranks on one device.
NCCL_MULTI_RANK = (2, 30)


def join(job: Job, meeting: Meeting) -> torch.device:
    """Make the default group of a test and return this rank's device; an accelerator is made current first."""
    on_cpu, index = job.placement.device == "cpu", meeting.rank // job.placement.ranks_per_gpu
    device = torch.device("cpu") if on_cpu else torch.device(job.placement.device, index)
    os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(device.index or 0))
    bound = None
    if device.type == "cuda":
        _nccl_environment(job)
        compat.use_cuda(device)
        bound = device if "nccl" in job.placement.backend else None
    timeout = timedelta(seconds=job.group_timeout_s)
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


def _nccl_environment(job: Job) -> None:
    """Allow several ranks per device where NCCL can."""
    if job.placement.ranks_per_gpu > 1 and "nccl" in job.placement.backend:
        version = compat.nccl_version()
        if version[:2] < NCCL_MULTI_RANK:
            raise RuntimeError(
                f"{job.placement.ranks_per_gpu} ranks per GPU under NCCL need NCCL "
                f"{'.'.join(map(str, NCCL_MULTI_RANK))}, found {'.'.join(map(str, version))}; use --ranks-backend gloo"
            )
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
