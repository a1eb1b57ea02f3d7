"""Start and end of the process group, and the one error that every rank prints when something does not fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Unfit(Exception):
    """The job cannot start as asked; the text says what to change."""


@dataclass(frozen=True)
class World:
    """The ranks of this job: `dp * tp` processes, on GPUs where each can have one, else on the CPU."""

    rank: int
    size: int
    device: torch.device

    def mesh(self, **axes: int) -> DeviceMesh:
        """A device mesh over all ranks, `world.mesh(dp=2, tp=2)`."""
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def say(self, text: str = "") -> None:
        """Print once, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def start(dp: int, tp: int) -> World:
    """Join the group that torchrun describes; refuses what does not fit, on every rank and before anything is built."""
    if not dist.is_available():
        raise Unfit("this torch was built without torch.distributed: install a build that has it")
    if "RANK" not in os.environ:
        raise Unfit(f"start me on {dp * tp} ranks: torchrun --standalone --nproc-per-node {dp * tp} main.py")
    size = int(os.environ["WORLD_SIZE"])
    if size != dp * tp:
        raise Unfit(
            f"a {dp} x {tp} mesh takes {dp * tp} ranks and there are {size}: change --nproc-per-node, --dp or --tp"
        )
    local_size, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # ranks share this machine's cores
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", timeout=timedelta(minutes=3), device_id=device if on_gpus else None
    )
    return World(dist.get_rank(), size, device)


def run(job: Callable[[], None]) -> int:
    """Run the job; what it refuses becomes one message on each rank and a non-zero exit code."""
    try:
        job()
    except (Unfit, ValueError, TypeError) as error:
        print(f"rank {os.environ.get('RANK', '-')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0
