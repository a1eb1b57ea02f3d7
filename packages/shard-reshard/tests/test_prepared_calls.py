"""Prepared calls under attack: ranks that differ, freed memory, handles that fail or are dropped."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, Resharder, StateDictResharder, plan_reshard, reshard, reshard_state_dict
from shard_reshard.execution.mover import ReshardWork

SHAPE, CALLS = (8, 6), 60


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.ranks(2)
def test_one_rank_prepares_while_another_replays(ranks: Ranks) -> None:
    rng = random.Random(100 + ranks.rank)  # each rank does something else with its tensors in every call
    compared = 0
    for src, dst, limit in (("2: S(0)", "2: S(1)", None), ("2: P", "2: R", None), ("2: S(1)", "2: S(0)", 64)):
        plan = plan_reshard(SHAPE, torch.float32, src, dst, max_workspace_bytes=limit)
        resharder = Resharder(plan)
        shape, out_shape = plan.src.local_shapes(ranks.rank)[0], plan.dst.local_shapes(ranks.rank)[0]
        source, out = torch.zeros(shape), torch.zeros(out_shape)
        for number in range(CALLS):
            full = torch.arange(48.0).view(SHAPE) * (number + 1)
            value = full if src == "2: P" else full.chunk(2, int(src[5]))[ranks.rank]
            expected = full * 2 if src == "2: P" else full.chunk(2, int(dst[5]))[ranks.rank]
            change = rng.choice(["same", "same", "same", "freed", "data", "turned", "resized", "shorter", "leaf"])
            if change == "freed":
                del source
                source = torch.empty(shape)
            elif change == "data":
                source.data = torch.empty(shape)
            elif change == "turned":
                source = torch.empty(shape[::-1]).t()
            elif change == "resized":
                source = torch.empty(shape)
                source.resize_(shape[0] * 2, shape[1]).resize_(shape)
            elif change == "shorter":  # the same address, and more memory than the tensor has
                source = torch.empty(shape[0] + 3, shape[1])[: shape[0]]
            elif change == "leaf":
                source = torch.empty(shape).requires_grad_()
            with torch.no_grad():
                source.copy_(value)
                kind = rng.choice(["out", "out", "new out", "strided out", "none", "async", "async out"])
                if kind == "new out":
                    out = torch.zeros(out_shape)
                elif kind == "strided out":
                    out = torch.zeros(*out_shape[:-1], 2 * out_shape[-1])[..., ::2]
                moved = resharder(source, out=out if "out" in kind else None, async_op="async" in kind)
                moved = moved.wait() if "async" in kind else moved
                assert torch.equal(moved, expected), (src, dst, change, kind)
                assert "out" not in kind or moved.data_ptr() == out.data_ptr()
                compared += moved.numel()
    assert compared >= 3 * CALLS * 24


@pytest.mark.ranks(2)
def test_freed_memory_is_an_error_on_all_ranks_before_anything_moves(ranks: Ranks) -> None:
    full = torch.arange(48.0).view(SHAPE)
    local = full.chunk(2)[ranks.rank].clone()
    plan = plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)")
    source = _freed(local) if ranks.rank else local
    out = torch.zeros(8, 3)
    layouts: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": SHAPE}}
    calls: list[Callable[[], Any]] = [
        lambda: reshard(source, "2: S(0)", "2: S(1)", shape=SHAPE, check="always"),
        lambda: Resharder(plan, check="always")(source),
        lambda: Resharder(plan, check="always")(local, out=_freed(out) if ranks.rank else out),
        lambda: reshard_state_dict({"w": source}, "2: S(1)", **layouts, check="always"),
        lambda: reshard_state_dict(
            {"w": local}, "2: S(1)", **layouts, out={"w": _freed(out) if ranks.rank else out}, check="always"
        ),
    ]
    for call in calls:
        with pytest.raises(PlanError, match="no-data"):
            call()
    state = StateDictResharder({"w": local}, "2: S(1)", **layouts)
    assert torch.equal(state({"w": local})["w"], full.chunk(2, 1)[ranks.rank])


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:a reshard of")
def test_a_dropped_handle_does_not_end_its_resharder(ranks: Ranks) -> None:
    full = torch.arange(48.0).view(SHAPE)
    compared = 0
    for limit in (None, 64):
        resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(1)", "2: S(0)", max_workspace_bytes=limit))
        for number in range(8):
            local = full.chunk(2, 1)[ranks.rank] + number
            handle = resharder(local, async_op=True)
            if number % 3 == ranks.rank:  # another rank in another call
                del handle
                gc.collect()
            else:
                assert torch.equal(handle.wait(), full.chunk(2)[ranks.rank] + number)
            moved = resharder(local * 2)
            assert torch.equal(moved, (full.chunk(2)[ranks.rank] + number) * 2)
            compared += moved.numel()
    assert compared == 2 * 8 * 24


def test_a_handle_that_failed_fails_again() -> None:
    def fail() -> None:
        raise RuntimeError("a rank died")

    handle = ReshardWork(torch.zeros(2), fail, "a tensor")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank died"):
            handle.wait()


@pytest.mark.ranks(2)
def test_views_kept_for_strides_are_bounded(ranks: Ranks) -> None:
    full = torch.arange(48.0).view(SHAPE)
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))

    def grown(numbers: range) -> int:
        """Return how many blocks of the interpreter's memory calls with these strides leave behind."""
        gc.collect()
        before = sys.getallocatedblocks()
        for number in numbers:
            out = torch.zeros(8, 3 + number)[:, :3]
            for _ in range(2):
                assert torch.equal(resharder(full.chunk(2)[ranks.rank], out=out), full.chunk(2, 1)[ranks.rank])
        gc.collect()
        return sys.getallocatedblocks() - before

    grown(range(1, 11))  # what a first call makes once
    few = grown(range(11, 111))
    assert few > 500
    assert grown(range(111, 711)) < 4 * few  # six times as many strides: all of them would be six times as much
