"""Every element arrives where the destination layout says, for random pairs of layouts, in one process."""

from __future__ import annotations

import random

import pytest
import torch
from layout_pairs import as_listed, local_tensors, random_layout, random_shape
from random_moves import check_programs
from random_pairs import check_pairs
from shard_reshard import PlanError, plan_reshard, simulate
from shard_reshard.layout.boxes import ShardMapView
from shard_reshard.layout.parse import resolve_layout
from shard_reshard.layout.shard_map import ITEMSIZES, ShardMap
from shard_reshard.planning import make_plan

NUM_PAIRS = 600


def test_random_pairs() -> None:
    # benchmarks/grids.py runs 10,000, see docs/benchmarks/shard-reshard-grids.md.
    counts = check_pairs(NUM_PAIRS, seed=0)
    assert counts.pairs == NUM_PAIRS
    assert counts.elements > 10 * NUM_PAIRS
    assert counts.bounded > NUM_PAIRS // 5
    assert counts.in_rounds > NUM_PAIRS // 40


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_random_programs_on_odd_tensors() -> None:
    # benchmarks/grids.py runs 12,000. Every dtype, odd strides on both sides, casts, sums, fused plans.
    counts = check_programs(200, seed=0)
    assert counts.plans > counts.programs == 200
    assert counts.elements > 4_000
    assert counts.guards > 8_000
    assert set(ITEMSIZES) <= set(counts.odd)
    kinds = ["fused", "expanded", "negated", "conjugated", "turned destination", "cast", "pending", "partial product"]
    assert min(counts.odd[kind] for kind in (*kinds, "0-dim", "no elements")) > 2


def test_pieces_shared_out_and_relayed_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small tensors come whole from one holder and are not relayed; here they are, so that both ways are walked.
    monkeypatch.setattr("shard_reshard.plan.SMALLEST_PART_BYTES", 1)
    rng = random.Random(2)
    relayed = shared = reduced = 0
    for _ in range(200):
        world_size, shape = rng.randint(2, 6), random_shape(rng)
        src: ShardMap | str = random_layout(rng, shape, world_size)
        dst = rng.choice(["{n}: R", "2x{h}: R, S(0)", "2x{h}: S(-1), R", "{n}: P"]).format(
            n=world_size, h=world_size // 2
        )
        if rng.random() < 0.4 or not shape:
            dst = f"{world_size}: R"
        if rng.random() < 0.3:
            src = f"{world_size}: P" if rng.random() < 0.7 else f"2x{world_size // 2}: P, R"
        limit = rng.choice([None, None, 512])
        plan = make_plan(resolve_layout(src, shape), resolve_layout(dst, shape), "int64", None, limit)
        parts = [torch.randint(-50, 50, shape) for _ in range(world_size)]
        full, sources = parts[0], []
        if plan.src.num_partials > 1:
            owners = [ranks[0] for ranks in next(iter(plan.src.cells())).owners] if full.numel() else [0]
            replicas = next(iter(plan.src.cells())).owners if full.numel() else ()
            sources = [
                [parts[next(h[0] for h in replicas if rank in h)]] if any(rank in h for h in replicas) else [full]
                for rank in range(world_size)
            ]
            sources = [shards if rank in plan.src.rank_set else [] for rank, shards in enumerate(sources)]
            full = sum((parts[rank] for rank in owners), torch.zeros_like(full)) if full.numel() else full
            reduced += 1
        else:
            sources = [local_tensors(plan.src, rank, full) for rank in range(world_size)]
        moved = [as_listed(actual) for actual in simulate(plan, sources)]
        total = torch.zeros_like(full)
        for rank in range(world_size):
            if plan.dst.num_partials > 1:
                total = total + moved[rank][0]
                continue
            for actual, expected in zip(moved[rank], local_tensors(plan.dst, rank, full), strict=True):
                assert torch.equal(actual, expected), (plan.src, plan.dst, rank)
        if plan.dst.num_partials > 1 and not plan.is_identity:
            assert torch.equal(total, full)
        assert plan.wire_bytes == plan.lower_bound or (plan.reduce_op is not None and not plan.uses_scatter_allgather)
        relayed += plan.uses_scatter_allgather
        shared += plan.src.max_replicas > 1
    assert min(relayed, shared, reduced) > 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [None, 2048])
def test_partial_sources_reduce_in_rank_order(dtype: torch.dtype, limit: int | None) -> None:
    shape = (16, 12)
    parts = [torch.randn(shape).to(dtype) for _ in range(4)]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    references = {"sum": total.to(dtype), "avg": (total / 4).to(dtype)}
    references["max"] = torch.stack(parts).amax(0)
    references["min"] = torch.stack(parts).amin(0)
    for op, reference in references.items():
        for dst in ("4: R", "4: S(0)", "4: S(1)", "2x2: S(1), R", "2: S(1) on ranks 2..3", "whole on rank 3"):
            plan = plan_reshard(shape, dtype, f"4: P({op})", dst, max_workspace_bytes=limit)
            moved = simulate(plan, parts)
            for rank in range(4):
                for actual, local in zip(as_listed(moved[rank]), local_tensors(plan.dst, rank, reference), strict=True):
                    assert torch.equal(actual, local), (op, dst, rank)


def test_a_window_of_an_average_is_averaged() -> None:
    window = ShardMapView(resolve_layout("2: P(avg)", (4, 3)), (1, 0), (2, 3))
    parts = [torch.randn(4, 3), torch.randn(4, 3)]
    moved = simulate(make_plan(window, resolve_layout("2: R", (2, 3)), "float32"), parts)
    assert all(torch.equal(each, ((parts[0] + parts[1]) / 2)[1:3]) for each in moved)  # type: ignore[arg-type]  # one each


def test_replicas_of_a_reduction_are_bit_equal() -> None:
    # Sums of floats depend on their order: all replicas have to add in one, whichever rank each addend came from.
    parts = [torch.randn(7, 5) * 10.0**k for k in range(4)]
    for limit in (None, 400):
        plan = plan_reshard((7, 5), torch.float32, "4: P", "4: R", max_workspace_bytes=limit)
        moved = [as_listed(result)[0] for result in simulate(plan, parts)]
        assert all(torch.equal(result, moved[0]) for result in moved)


def test_partial_destination_holds_the_value_once() -> None:
    full = torch.arange(12.0).view(3, 4)
    plan = plan_reshard((3, 4), torch.float32, "4: S(1)", "2x2: P, S(0)")
    moved = [as_listed(result)[0] for result in simulate(plan, list(full.chunk(4, 1)))]
    assert torch.equal(torch.cat([moved[0] + moved[2], moved[1] + moved[3]]), full)


def test_wire_bytes_of_a_reduction_to_replicas_meet_the_bound() -> None:
    plan = plan_reshard((64, 64, 8), torch.float32, "4: P", "4: R")
    assert plan.uses_scatter_allgather
    assert plan.wire_bytes == plan.lower_bound == 2 * 3 * 64 * 64 * 8 * 4


def test_one_holder_scatters_and_receivers_pass_on() -> None:
    plan = plan_reshard((64, 64, 8), torch.float32, "whole on rank 0", "8: R")
    assert plan.uses_scatter_allgather
    sent = [sum(row) for row in plan.bytes_matrix]
    assert max(sent) < 2 * 64 * 64 * 8 * 4  # not seven copies out of rank 0
    assert plan.wire_bytes == plan.lower_bound


def test_a_cast_travels_in_the_smaller_dtype() -> None:
    full = torch.randn(8, 6)
    for dtype, out_dtype, itemsize in (
        (torch.float32, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 2),
        (torch.float32, torch.float8_e4m3fn, 1),
    ):
        plan = plan_reshard((8, 6), dtype, "3: S(0)", "3: S(1)", out_dtype=out_dtype)
        source = full.to(dtype)
        moved = simulate(plan, [local_tensors(plan.src, rank, source)[0] for rank in range(3)])
        assert plan.itemsize == itemsize
        for rank in range(3):
            expected = local_tensors(plan.dst, rank, source.to(out_dtype).float())[0]
            assert torch.equal(as_listed(moved[rank])[0].float(), expected)


def test_strided_and_expanded_sources() -> None:
    full = torch.arange(48.0).view(6, 8)
    plan = plan_reshard((6, 8), torch.float32, "2: S(0)", "2: S(1)")
    turned = [half.t().contiguous().t() for half in full.chunk(2)]
    assert not turned[0].is_contiguous()
    for rank, result in enumerate(simulate(plan, turned)):
        assert torch.equal(as_listed(result)[0], full.chunk(2, 1)[rank])
    row = torch.arange(8.0).expand(3, 8)
    for result, expected in zip(simulate(plan, [row, row]), row.repeat(2, 1).chunk(2, 1), strict=True):
        assert torch.equal(as_listed(result)[0], expected)


def test_transpose_is_the_adjoint() -> None:
    # <A x, y> == <x, A' y> for the linear map of all ranks' tensors, and transposing twice gives the plan.
    rng = random.Random(1)
    for _ in range(150):
        world_size, shape = rng.randint(2, 5), random_shape(rng)
        src, dst = random_layout(rng, shape, world_size), random_layout(rng, shape, world_size)
        plan = plan_reshard(shape, torch.float64, src, dst)
        assert plan.transpose().transpose() == plan
        shards = [[torch.randint(-9, 9, s).double() for s in src.local_shapes(r)] for r in range(world_size)]
        grads = [[torch.randint(-9, 9, s).double() for s in dst.local_shapes(r)] for r in range(world_size)]
        moved, back = simulate(plan, shards), simulate(plan.transpose(), grads)
        forward = sum(
            float((a * b).sum()) for r in range(world_size) for a, b in zip(as_listed(moved[r]), grads[r], strict=True)
        )
        backward = sum(
            float((a * b).sum()) for r in range(world_size) for a, b in zip(shards[r], as_listed(back[r]), strict=True)
        )
        assert forward == backward  # small integers: exact


def test_holes_and_overlaps_are_named() -> None:
    from shard_spec import Box

    boxes = {0: [Box((0, 0), (4, 4))], 1: [Box((3, 0), (4, 8))], 2: [Box((7, 0), (1, 8))]}
    with pytest.raises(PlanError) as caught:
        plan_reshard((8, 8), torch.float32, boxes, "3: S(0)")
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["boxes-overlap", "boxes-incomplete"]
    assert "Box(offsets=(3, 0), sizes=(4, 8)) of rank 1" in str(caught.value)
    assert "no rank has Box(offsets=(0, 4), sizes=(3, 4))" in str(caught.value)
