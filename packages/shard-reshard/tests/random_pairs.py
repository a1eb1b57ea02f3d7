"""Random pairs of layouts moved in one process, every element compared: sampled by a test, in full by a script."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import torch
from layout_pairs import as_listed, local_tensors, random_layout, random_shape
from shard_reshard import ReshardPlan, plan_reshard, simulate
from shard_reshard.lowering import build_program


@dataclass
class Counts:
    """How much was compared."""

    pairs: int = 0
    elements: int = 0
    bounded: int = 0  # pairs under max_workspace_bytes
    in_rounds: int = 0  # of these, pairs that needed several rounds
    most_rounds: int = 0


def check_pairs(count: int, seed: int) -> Counts:
    """Move `count` random pairs; raises at the first wrong element, byte or buffer."""
    rng = random.Random(seed)
    counts = Counts()
    for _ in range(count):
        world_size, shape = rng.randint(1, 4), random_shape(rng)
        src, dst = random_layout(rng, shape, world_size), random_layout(rng, shape, world_size)
        limit = rng.choice([None, None, None, 64, 256])
        full = torch.randint(-1000, 1000, shape, dtype=torch.int16)
        plan = plan_reshard(shape, full.dtype, src, dst, max_workspace_bytes=limit)
        counts.pairs += 1
        counts.elements += _compared(plan, full, world_size)
        if limit is not None:
            _count_rounds(plan, limit, world_size, counts)
        assert plan.wire_bytes == plan.lower_bound, (src, dst)
        if rng.random() < 0.1:
            unpickled = pickle.loads(pickle.dumps(plan))
            assert unpickled == plan
            assert unpickled.to_json() == plan.to_json()
    return counts


def _compared(plan: ReshardPlan, full: torch.Tensor, world_size: int) -> int:
    """Moves `full` by the plan and compares every rank's tensors; returns how many elements were compared."""
    moved = simulate(plan, [local_tensors(plan.src, rank, full) for rank in range(world_size)])
    compared = 0
    for rank in range(world_size):
        actual, expected = as_listed(moved[rank]), local_tensors(plan.dst, rank, full)
        assert len(actual) == len(expected)
        for tensor, reference in zip(actual, expected, strict=True):
            assert torch.equal(tensor, reference), (plan.src, plan.dst, rank)
            compared += tensor.numel()
    return compared


def _count_rounds(plan: ReshardPlan, limit: int, world_size: int, counts: Counts) -> None:
    assert all(plan.workspace_bytes(rank) <= limit for rank in range(world_size))
    rounds = sum(step.exchanges for step in build_program((plan,), 0, world_size).steps)
    counts.bounded += 1
    counts.in_rounds += rounds > 1
    counts.most_rounds = max(counts.most_rounds, rounds)
