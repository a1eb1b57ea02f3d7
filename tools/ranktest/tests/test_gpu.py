"""On a GPU: versions, and every collective under NCCL: right values, no wait of the host for the device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks


@pytest.mark.gpu
@pytest.mark.ranks(1)
def test_every_collective_and_the_versions(ranks: Ranks) -> None:
    row: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        row |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        nccl = ctypes.c_int()  # of the library that is loaded; torch names the one that it was built with
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
        row |= {"devices": torch.cuda.device_count(), "nccl": nccl.value}
    ranks.write_row(**row)
    x = torch.arange(1024, dtype=torch.float32, device=ranks.device)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(out.copy_(x)),
        "broadcast": lambda: dist.broadcast(out.copy_(x), src=0),
        "all_gather": lambda: dist.all_gather([out], x),
        "reduce_scatter": lambda: dist.reduce_scatter(out, [x]),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x, [1024], [1024]),
    }
    for name, call in calls.items():
        call()
        out.fill_(-1)
        with ranks.no_host_waits():
            call()
        assert torch.equal(out, x), name
