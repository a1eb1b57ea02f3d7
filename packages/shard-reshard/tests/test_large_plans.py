"""Plans above 2**31 elements: offsets, sizes and bytes are exact, checked element by element at random places."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from shard_reshard import ReshardPlan, plan_reshard

SHAPES = [(70_000, 70_001), (3, 2**31 + 7), (2**33 + 5,), (2**20, 5, 3001)]
PAIRS = [
    ("8: S(0)", "8: S(-1)"),
    ("2x4: S(-1), S(0)", "8: S(0)"),
    ("8: B(0,1000,cyclic)", "8: S(0)"),
    ("8: R", "2x4: S(0), S(-1)"),
    ("rank 0", "8: S(-1)"),
    ("8: P", "8: S(0)"),
]


def _holds(plan: ReshardPlan, side: str, rank: int, index: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where ``rank`` has an element, from its pieces."""
    for start, stop, _, local in (plan.src if side == "src" else plan.dst).local_pieces(rank):
        if all(a <= at < b for a, at, b in zip(start, index, stop, strict=True)):
            return tuple(place + at - a for place, at, a in zip(local, index, start, strict=True))
    return None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_has_one_way(shape: tuple[int, ...]) -> None:
    rng, followed = random.Random(1), 0
    for src, dst in PAIRS:
        if "B(" in src and shape[0] > 10**8:
            continue  # millions of blocks
        plan = plan_reshard(shape, torch.float32, src, dst)
        total = 1
        for size in shape:
            total *= size
        assert plan.wire_bytes == plan.lower_bound
        assert plan.wire_bytes <= total * 4 * 8
        assert pickle.loads(pickle.dumps(plan)).digest == plan.digest
        arriving = {rank: plan.rank_schedule(rank)[0] for rank in range(8)}
        for _ in range(12):
            index = tuple(rng.randrange(size) for size in shape)
            for rank in range(8):
                expected = _holds(plan, "dst", rank, index)
                if expected is None:
                    continue
                copies = [
                    copy
                    for listed in (*arriving[rank].receives.values(), arriving[rank].own)
                    for copy in listed
                    if all(a <= at < a + n for a, at, n in zip(copy.start, index, copy.sizes, strict=True))
                ]
                assert len(copies) == plan.src.num_partials
                for copy in copies:
                    shift = [at - a for at, a in zip(index, copy.start, strict=True)]
                    assert expected == tuple(a + b for a, b in zip(copy.dst_start, shift, strict=True))
                    src_index = tuple(a + b for a, b in zip(copy.src_start, shift, strict=True))
                    assert src_index == _holds(plan, "src", copy.src_rank, index)
                    if copy.src_rank != rank:  # the sender's own part has the same copy
                        assert copy in arriving[copy.src_rank].sends[rank]
                    followed += 1
        for rank in (0, 7):
            part = arriving[rank]
            received = sum(copy.numel for listed in part.receives.values() for copy in listed)
            assert received * 4 == sum(row[rank] for row in plan.bytes_matrix)
    assert followed > 60
