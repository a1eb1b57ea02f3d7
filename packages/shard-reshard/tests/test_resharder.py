"""The contract of calls: handles, kept buffers, and what happens when ranks disagree."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_reshard import PlanError, Resharder, StateDictResharder, plan_reshard, reshard

SHAPE = (8, 12)


def _full(step: int = 0) -> torch.Tensor:
    return torch.arange(96.0).view(SHAPE) + 100 * step


@pytest.mark.ranks(2, 4)
def test_a_kept_workspace_is_never_the_result(ranks: Ranks) -> None:
    n = ranks.world_size
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, f"{n}: S(0)", f"{n}: S(1)"))
    results = []
    for step in range(5):
        with ranks.delayed():
            results.append(resharder(_full(step).chunk(n)[ranks.rank].to(ranks.device)))
    for step, moved in enumerate(results):
        assert torch.equal(moved.cpu(), _full(step).chunk(n, 1)[ranks.rank])
    backward = Resharder(plan_reshard(SHAPE, torch.float32, f"{n}: S(1)", f"{n}: S(0)"))
    out = torch.empty_like(_full().chunk(n)[ranks.rank], device=ranks.device)
    for step, moved in enumerate(results):
        assert backward(moved, out=out) is out
        assert torch.equal(out.cpu(), _full(step).chunk(n)[ranks.rank])


@pytest.mark.ranks(2)
def test_a_call_in_flight_refuses_a_second_one(ranks: Ranks) -> None:
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))
    local = _full().chunk(2)[ranks.rank].to(ranks.device)
    handle = resharder(local, async_op=True)
    with pytest.raises(RuntimeError, match="in flight"):
        resharder(local)
    for odd in (copy.deepcopy, copy.copy, pickle.dumps):  # a copy of the result would never be filled
        with pytest.raises(TypeError, match="a ReshardWork belongs to a process group"):
            odd(handle)
    # A module that has a resharder is copied with it; the copy has a workspace of its own, and nothing to agree on.
    other = torch.nn.Module()
    other.resharder = resharder  # type: ignore[assignment]  # as users do
    twin: Any = copy.deepcopy(other).resharder
    assert twin is not resharder
    assert torch.equal(twin(local + 1).cpu(), _full().chunk(2, 1)[ranks.rank] + 1)
    for odd in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="pickle its plan"):
            odd(resharder)
    assert pickle.loads(pickle.dumps(resharder.plan)) == resharder.plan
    with pytest.raises(TypeError, match="make another one"):
        copy.deepcopy(StateDictResharder({"w": local}, "2: R", src_layouts={"w": "2: S(0)"}, shapes={"w": SHAPE}))
    assert not handle.is_completed()
    assert torch.equal(handle.wait().cpu(), _full().chunk(2, 1)[ranks.rank])
    assert handle.is_completed()
    assert handle.wait() is handle.wait()
    resharder(local)


@pytest.mark.ranks(3)
def test_handles_waited_for_out_of_order(ranks: Ranks) -> None:
    with ranks.delayed():
        handles = []
        for step in range(4):
            local = _full(step).chunk(3)[ranks.rank].to(ranks.device)
            limit = 200 if step == 2 else None  # several rounds: all but the last end in the call
            handles.append(reshard(local, "3: S(0)", "3: S(1)", shape=SHAPE, async_op=True, max_workspace_bytes=limit))
            del local  # the handle holds what is still being sent
        for step in (3, 0, 2, 1) if ranks.rank else (1, 3, 0, 2):
            assert torch.equal(handles[step].wait().cpu(), _full(step).chunk(3, 1)[ranks.rank])


@pytest.mark.ranks(2)
def test_a_dropped_handle_warns(ranks: Ranks) -> None:
    handle = reshard(_full().chunk(2)[ranks.rank], "2: S(0)", "2: S(1)", shape=SHAPE, async_op=True)
    handles = [handle]
    del handle
    with pytest.warns(RuntimeWarning, match="never waited for"):
        handles.clear()
    gc.collect()


@pytest.mark.ranks(4)
def test_ranks_that_disagree_all_raise_the_same_within_seconds(ranks: Ranks) -> None:
    local = torch.zeros(2, 12)
    odd = ranks.rank == 2
    calls: dict[str, Callable[[], Any]] = {
        "ranks-disagree": lambda: reshard(local, "4: S(0)", "4: S(1)" if odd else "2x2: S(1), R", shape=SHAPE),
        "shape-mismatch": lambda: reshard(local[: 1 + odd], "4: S(0)", "4: R", shape=SHAPE),
        "dim-out-of-range": lambda: reshard(local, "4: S(0)", "4: S(5)" if odd else "4: S(-1)", shape=SHAPE),
        "ranks-disagree ": lambda: reshard(local.double() if odd else local, "4: S(0)", "2x2: S(1), S(0)", shape=SHAPE),
        "boxes-incomplete": lambda: reshard(local, _holey(odd), "2x2: S(0), S(1)", shape=SHAPE),
        "rank-outside-mesh|mesh|rank-outside-mesh": lambda: reshard(local, "4: S(0)", "8: S(0)", shape=SHAPE),
        "invalid-out": lambda: reshard(local, "4: S(0)", "2x2: S(0), S(0)", shape=SHAPE, out=local if odd else None),
        "missing-argument": lambda: reshard(local, "4: S(0)", "4: S(1)", shape=None if odd else (8, 24)),
    }
    for code, call in calls.items():
        begin = time.monotonic()
        with ranks.record() as log, pytest.raises(PlanError, match=code.strip()) as caught:
            call()
        assert time.monotonic() - begin < 10
        assert log.count("all_to_all") == 0
        assert len(set(ranks.gather(str(caught.value)))) == 1
    assert torch.equal(local, torch.zeros(2, 12))


def _holey(odd: bool) -> object:
    from shard_spec import Box

    boxes = {rank: Box((2 * rank, 0), (2, 12)) for rank in range(4)}
    if odd:
        boxes[3] = Box((6, 0), (2, 11))
    return boxes


@pytest.mark.ranks(2)
def test_check_always_finds_a_later_disagreement(ranks: Ranks) -> None:
    local = torch.zeros(4, 12)
    args: dict[str, Any] = {"shape": SHAPE, "check": "always"}
    for dst in ("2: S(1)", "2: R"):
        reshard(local, "2: S(0)", dst, **args)
    with pytest.raises(PlanError, match="ranks-disagree"):
        reshard(local, "2: S(0)", "2: R" if ranks.rank else "2: S(1)", **args)
    with ranks.record() as log:
        reshard(local, "2: S(0)", "2: S(1)", **args)
    assert list(log.ops) == ["all_gather", "all_to_all"]
    with ranks.record() as log:
        reshard(local, "2: S(0)", "2: S(1)", shape=SHAPE)
        reshard(local, "2: S(0)", "2: S(1)", shape=SHAPE)
    assert log.count("all_to_all") == 2
    assert log.count("all_gather") <= 1


def test_without_a_process_group() -> None:
    with pytest.raises(PlanError, match="no-process-group"):
        reshard(torch.zeros(2), "2: S(0)", "2: R", shape=(4,))


_DEATHS: dict[str, tuple[dict[str, Any], str]] = {
    "sync": ({}, "all_to_all_single of call 2 of reshard plan"),
    "async": ({"async_op": True}, "all_to_all_single of call 2 of reshard plan"),
    "in rounds": ({"max_workspace_bytes": 64}, "all_to_all_single of call 2 of reshard plan"),
    "compared": ({"check": "always"}, "got no answer while ranks compared"),
}


@pytest.mark.filterwarnings("ignore:This process")  # fork, in a process with threads: these children do little
def test_a_rank_that_dies_is_reported_by_the_others(tmp_path: Path) -> None:
    # Worlds of their own, so that the deaths are this test's and nobody else's.
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=_die_or_report, args=(rank, str(tmp_path / how), how, queue))
        for how in _DEATHS
        for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    reports = dict(queue.get() for _ in _DEATHS)
    for how, (_, message) in _DEATHS.items():
        assert message in reports[how], how


def _die_or_report(rank: int, path: str, how: str, queue: Any) -> None:
    try:
        store = torch.distributed.FileStore(path, 2)  # type: ignore[attr-defined]  # public, though not declared so
        limit = timedelta(seconds=20)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        local = torch.zeros(4, 12)
        options: dict[str, Any] = {"shape": SHAPE, **_DEATHS[how][0]}
        for _ in range(2 - rank):  # the other one leaves after its first call
            moved = reshard(local, "2: S(0)", "2: S(1)", **options)
            if "async_op" in options:
                moved.wait()
        if rank == 0:
            queue.put((how, "no error"))
    except RuntimeError as error:
        queue.put((how, str(error)))
    finally:
        os._exit(0)


@pytest.mark.ranks(2)
def test_a_destroyed_group_is_let_go(ranks: Ranks) -> None:
    """Gloo ends its threads with the group; a thread that still holds a tensor while Python ends aborts the process."""
    group = dist.new_group([0, 1])
    local = torch.arange(8.0).view(4, 2)
    resharder = Resharder(plan_reshard((8, 2), torch.float32, "2: S(0)", "2: S(1)"), group)
    assert torch.equal(resharder(local), reshard(local, "2: S(0)", "2: S(1)", shape=(8, 2), group=group))
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None
    with pytest.raises(PlanError, match=r"no-process-group\] group: it was destroyed"):
        resharder(local)
