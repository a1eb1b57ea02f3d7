"""Tests with faults; run by test_faults.py. Odd ones fail, each is followed by one that passes."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks, supervise

supervise.GRACE_S = 2.0  # most tests wait so long for a rank that never comes


@pytest.mark.ranks(2)
def test_raises(ranks: Ranks) -> None:
    print("printed by rank", ranks.rank)
    payload = {"same": 1, "other": ranks.rank}
    assert payload == {"same": 1, "other": 0}
    dist.barrier()


@pytest.mark.ranks(2, timeout=6)
def test_hangs(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(100)


@pytest.mark.ranks(2)
def test_after_hangs(ranks: Ranks) -> None:
    assert ranks.gather(ranks.rank) == [0, 1]


@pytest.mark.ranks(2)
def test_dies(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os._exit(3)
    time.sleep(100)


@pytest.mark.ranks(2)
def test_after_dies(ranks: Ranks) -> None:
    assert ranks.gather(ranks.rank) == [0, 1]


@pytest.mark.ranks(3)
def test_three(ranks: Ranks) -> None:
    assert ranks.gather(ranks.rank) == [0, 1, 2]


@pytest.mark.ranks(2)
def test_all_skip() -> None:
    pytest.skip("not today")


@pytest.mark.ranks(2)
def test_one_skips(ranks: Ranks) -> None:
    if ranks.rank == 0:
        pytest.skip("not me")


@pytest.mark.ranks(2)
def test_warns() -> None:
    warnings.warn("careful", stacklevel=1)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:careful")
def test_warns_allowed() -> None:
    warnings.warn("careful", stacklevel=1)


class Careless:
    def __del__(self) -> None:
        raise ValueError("in del")


@pytest.mark.ranks(2)
def test_unraisable() -> None:
    Careless()


@pytest.mark.ranks(2)
def test_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


@pytest.mark.ranks(1, 2)
def test_sizes(ranks: Ranks) -> None:
    assert ranks.world_size == dist.get_world_size()


class TestMethods:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", [3])
    def test_method(self, ranks: Ranks, number: int, tmp_path: Path) -> None:
        assert number == 3
        assert len(set(ranks.gather(str(tmp_path)))) == 1
        assert len(set(ranks.gather(torch.rand(1).item()))) == 1
        assert torch.get_num_threads() == 1


@pytest.fixture
def unpicklable() -> object:
    return lambda: None


@pytest.mark.ranks(2)
def test_unpicklable(unpicklable: object) -> None:
    pass
