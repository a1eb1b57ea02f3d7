"""Starts ranks of its own (gloo, CPU) for the programs in this folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TESTS = str(Path(__file__).parent.parent / "tests")


def on_ranks(function: Callable[..., Any], size: int, *args: Any) -> Any:
    """Rank 0's result of `function(mesh, *args)`, which can be written as JSON.

    Args:
        function: A function of a module that can be imported.
        size: Number of ranks.
        args: What it gets after the mesh.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, function, args, folder), nprocs=size)  # type: ignore[no-untyped-call]
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, TESTS)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # tensor-parallel ranks take the same batch
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh: DeviceMesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    result = function(mesh, *args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()  # a rank that leaves early takes gloo's connections down under the others
    dist.destroy_process_group()
    # A dropped result of torch's styles is never waited for: the end of the process may abort in gloo's thread.
    os._exit(0)
