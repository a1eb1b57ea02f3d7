"""Real groups: random pairs of layouts, the bytes on the wire, delayed delivery, bounded buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layout_pairs import as_listed, local_tensors, random_layout, random_shape
from peak_memory import peak_bytes
from ranktest import Ranks
from shard_reshard import Resharder, plan_reshard, reshard

NUM_PAIRS = 100  # for each of three world sizes


@pytest.mark.ranks(2, 3, 4)
def test_random_pairs(ranks: Ranks) -> None:
    rng = random.Random(ranks.world_size)
    compared = 0
    for number in range(NUM_PAIRS):
        shape = random_shape(rng)
        src, dst = (random_layout(rng, shape, ranks.world_size) for _ in range(2))
        limit = rng.choice([None, None, 256])
        full = torch.arange(float(max(1, torch.Size(shape).numel())), device=ranks.device)[: torch.Size(shape).numel()]
        full = full.view(shape)
        local = local_tensors(src, ranks.rank, full)
        source = None if not local else local[0] if len(local) == 1 else local
        if number % 3 == 0:
            with ranks.delayed():
                moved = reshard(source, src, dst, max_workspace_bytes=limit)
        else:
            moved = reshard(source, src, dst, max_workspace_bytes=limit, dtype=torch.float32)
        expected = local_tensors(dst, ranks.rank, full)
        assert len(as_listed(moved)) == len(expected)
        for actual, reference in zip(as_listed(moved), expected, strict=True):
            assert torch.equal(actual, reference), (src, dst)
            compared += actual.numel()
    assert sum(ranks.gather(compared)) > NUM_PAIRS * 10


@pytest.mark.ranks(4)
def test_bytes_on_the_wire_are_the_lower_bound(ranks: Ranks) -> None:
    cases = [
        ("4: S(0)", "4: S(1)"),
        ("4: S(0)", "2x2: S(1), S(0)"),
        ("2x2: S(0), S(1)", "2x2: S(1), S(0)"),
        ("4: S(0)", "4: R"),
        ("2x2: R, S(0)", "2x2: S(1), R"),
        ("4: P", "4: S(0)"),
        ("4: S(0)", "4: I(0,[16,8,8])"),
        ("2: S(0) on ranks 0..1", "2: S(1) on ranks 2..3"),
        ("rank 2", "4: S(0)"),
    ]
    full = torch.randn(32, 24, device=ranks.device)
    for src, dst in cases:
        plan = plan_reshard((32, 24), torch.float32, src, dst)
        resharder = Resharder(plan)
        shards = [full.clone()] if "P" in src else local_tensors(plan.src, ranks.rank, full)
        local = shards[0] if shards else None
        resharder(local)
        with ranks.record() as log:
            resharder(local)
        assert list(log.ops) == ["all_to_all"]
        sent = tuple(log.events[0].bytes_sent)
        assert sent == plan.bytes_matrix[ranks.rank]
        assert sum(ranks.gather(log.bytes_sent())) == plan.wire_bytes == plan.lower_bound, (src, dst)


@pytest.mark.ranks(4)
def test_replicas_pass_parts_on(ranks: Ranks) -> None:
    full = torch.randn(64, 64, 16, device=ranks.device)
    plan = plan_reshard(full.shape, torch.float32, "4: P", "4: R")
    assert plan.uses_scatter_allgather
    parts = [full * (rank + 1) for rank in range(4)]
    with ranks.delayed():
        moved = reshard(parts[ranks.rank], "4: P", "4: R", shape=full.shape)
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal(moved, total)
    with ranks.record() as log:
        reshard(parts[ranks.rank], "4: P", "4: R", shape=full.shape)
    assert list(log.ops) == ["all_to_all", "all_to_all"]
    assert sum(ranks.gather(log.bytes_sent())) == plan.wire_bytes == plan.lower_bound


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11's profiler
@pytest.mark.ranks(4)
def test_bounded_rounds_stay_within_their_buffers(ranks: Ranks) -> None:
    full = torch.arange(128.0 * 96, device=ranks.device).view(128, 96)
    local = full.chunk(4)[ranks.rank]
    for limit in (20_000, 4_000, 700):
        plan = plan_reshard(full.shape, torch.float32, "4: S(0)", "4: S(1)", max_workspace_bytes=limit)
        assert plan.workspace_bytes(ranks.rank) <= limit
        resharder = Resharder(plan)
        resharder(local)
        with ranks.record() as log, ranks.delayed():
            moved = resharder(local)
        assert torch.equal(moved, full.chunk(4, 1)[ranks.rank])
        assert len(log.events) > 1
        assert all(event.op == "all_to_all" for event in log.events)
        assert max(sum(event.bytes_sent) for event in log.events) <= limit // 4
        out, kept, allocated = torch.empty_like(moved), Resharder(plan), list[int]()
        for _ in range(2):
            with torch.profiler.profile(profile_memory=True) as profile:
                kept(local, out=out)
            assert torch.equal(out, moved)
            events = [event for event in profile.events() if event.name == "aten::empty"]
            allocated.append(sum(max(0, event.self_cpu_memory_usage) for event in events))
        # The first call alone allocates four buffers, each rounded up to its alignment, and compares headers.
        assert limit // 8 < allocated[0] - allocated[1] <= limit + 4 * 16 + 1024


@pytest.mark.ranks(2)
def test_out_strided_views_and_sources_in_place(ranks: Ranks) -> None:
    full = torch.arange(48.0, device=ranks.device).view(6, 8)
    local = full.chunk(2)[ranks.rank].t().contiguous().t()  # columns lie together
    frame = torch.full((6, 10), -1.0, device=ranks.device)
    moved = reshard(local, "2: S(0)", "2: S(1)", shape=(6, 8), out=frame[:, 3:7])
    assert moved.data_ptr() == frame[:, 3:7].data_ptr()
    assert torch.equal(frame[:, 3:7], full.chunk(2, 1)[ranks.rank])
    assert bool((frame[:, [0, 1, 2, 7, 8, 9]] == -1).all())  # gloo itself writes beside a strided output
    one = torch.tensor(3.5, device=ranks.device)
    assert reshard(one if ranks.rank == 0 else None, "rank 0", "2: R", shape=()).item() == 3.5
    empty = torch.empty(0, 4, device=ranks.device)
    assert reshard(empty, "2: S(0)", "2: S(1)", shape=(0, 4)).shape == (0, 2)


@pytest.mark.ranks(2)
def test_conjugated_views_and_casts(ranks: Ranks) -> None:
    full = torch.view_as_complex(torch.arange(24.0, device=ranks.device).view(4, 3, 2))
    moved = reshard(full.conj().chunk(2)[ranks.rank], "2: S(0)", "2: S(1)", shape=(4, 3))
    assert torch.equal(moved, full.conj().resolve_conj().chunk(2, 1)[ranks.rank])
    floats = torch.arange(24.0, device=ranks.device).view(4, 6)
    for dtype in (torch.bfloat16, torch.float64):
        moved = reshard(floats.chunk(2)[ranks.rank], "2: S(0)", "2: S(1)", shape=(4, 6), dtype=dtype)
        assert torch.equal(moved, floats.to(dtype).chunk(2, 1)[ranks.rank])


@pytest.mark.ranks(2)
def test_peak_memory_as_measured(ranks: Ranks) -> None:
    def peak(call: Callable[[], object]) -> float:
        return peak_bytes(call) / shard

    shape = (512, 512)
    for src, dst in (("2: S(0)", "2: S(1)"), ("2: S(1)", "2: S(0)")):
        plan = plan_reshard(shape, torch.float32, src, dst)
        local, out = (torch.randn(side.local_shapes(ranks.rank)[0]) for side in (plan.src, plan.dst))
        shard = local.numel() * 4
        resharder = Resharder(plan)
        reshard(local, src, dst, shape=shape)
        resharder(local, out=out)
        fresh = peak(lambda a=local, b=src, c=dst: reshard(a, b, c, shape=shape))  # type: ignore[misc]  # bound early
        assert fresh <= 2.0
        assert fresh * shard == pytest.approx(plan.peak_bytes(ranks.rank), abs=1024)
        assert peak(lambda a=local, r=resharder, o=out: r(a, out=o)) * shard < 1024  # type: ignore[misc]  # bound early
    for src, dst, dtype, out_dtype in (
        ("2: S(0)", "2: S(1)", torch.float32, torch.float32),
        ("2: S(0)", "2: S(1)", torch.float32, torch.bfloat16),
        ("2: P", "2: S(1)", torch.float32, torch.float32),
        ("2: P(max)", "2: S(0)", torch.float32, torch.float32),
        ("2: P", "2: S(1)", torch.bfloat16, torch.bfloat16),
    ):
        limit = 256 * 1024
        plan = plan_reshard(shape, dtype, src, dst, out_dtype=out_dtype, max_workspace_bytes=limit)
        local = torch.ones(plan.src.local_shapes(ranks.rank)[0], dtype=dtype)
        out = torch.empty(plan.dst.local_shapes(ranks.rank)[0], dtype=out_dtype)

        def bounded(local: Any = local, plan: Any = plan, out: Any = out, limit: int = limit) -> None:
            reshard(local, plan.src, plan.dst, shape=shape, out=out, max_workspace_bytes=limit)

        bounded()
        used = peak(bounded) * shard
        # Halves are summed in float32 tensors of the result's size, which the bound of buffers does not count.
        apart = 4 * 512 * 256 if dtype == torch.bfloat16 else 0
        assert plan.workspace_bytes(ranks.rank) <= limit + apart
        assert used <= plan.workspace_bytes(ranks.rank) + (2**17 if apart else 2048), (src, dst, dtype)


@pytest.mark.ranks(2)
def test_a_cast_of_a_tensor_that_one_rank_holds(ranks: Ranks) -> None:
    """A rank without a source learns its dtype; the destination's is an argument."""
    full = torch.arange(8.0, device=ranks.device)
    moved = reshard(full if ranks.rank == 0 else None, "rank 0", "2: S(0)", shape=(8,), dtype=torch.bfloat16)
    assert torch.equal(moved, full[4 * ranks.rank :][:4].to(torch.bfloat16)) and moved.dtype is torch.bfloat16
