"""An end that fails leaves the group of a sync: the neighbours of a dead rank raise first, then all others do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_reshard import StateDictResharder
from shard_reshard._torch_compat import register_group
from shard_reshard.state_dict.resharder import SyncEnd

RANKS, TIMEOUT = 4, 40


def _joined(rank: int, folder: str) -> dist.ProcessGroup:
    """A group beside the default group, as two jobs make it."""
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]  # torch does not list it
    group: Any = dist.ProcessGroup(store, rank, RANKS)
    backend = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=TIMEOUT))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    register_group(group, "a sync", "cpu:gloo")
    return group  # type: ignore[no-any-return]


def _end(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/own{rank}", rank=0, world_size=1)
    end, full = SyncEnd(), torch.arange(32.0).view(8, 4)
    state = {"w": full.chunk(2)[rank].clone()} if rank < 2 else {}  # two trainers, two workers
    layouts: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (8, 4)}}
    out = {} if rank < 2 else {"w": torch.zeros(8, 2)}
    end.resharder = StateDictResharder(state, "2: S(1) on ranks 2,3", out=out, group=_joined(rank, folder), **layouts)
    end.exchange(state, out=out)
    assert rank < 2 or torch.equal(out["w"], full.chunk(2, 1)[rank - 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        end.exchange(state, out=out)
    except RuntimeError as error:
        results.put((rank, time.monotonic() - begin, str(error), end.resharder is None))
    time.sleep(TIMEOUT)  # its process lives on, as an engine's


@pytest.mark.filterwarnings("ignore:This process")  # fork, in a process with threads: these children do little
def test_all_ends_raise_after_a_trainer_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ends = [context.Process(target=_end, args=(rank, str(tmp_path), results)) for rank in range(RANKS)]
    try:
        for end in ends:
            end.start()
        failed = [results.get(timeout=TIMEOUT) for _ in range(RANKS - 1)]
    finally:
        for end in ends:
            end.kill()
    assert sorted(rank for rank, *_ in failed) == [0, 2, 3]
    for rank, seconds, text, dropped in failed:
        assert dropped, rank
        assert seconds < TIMEOUT / 2, (rank, text)
        assert "left the group" in text
