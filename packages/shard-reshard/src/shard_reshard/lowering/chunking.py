"""Rounds: how a plan is cut so that no rank needs more buffer bytes than it may use."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import Index
from shard_reshard.plan.plan import Plan
from shard_reshard.plan.schedule import all_ranks_copies


def num_rounds(plan: Plan, stage: int, partial_index: int | None) -> int:
    """Into how many rounds a stage (or one addend of it) is cut; the same on every rank.

    Each message is cut into that many shares of nearly equal size. Two rounds are under way at a time, so a round's
    buffers, sending and receiving, may use half of the bound.

    Raises:
        PlanError: ``invalid-argument`` when even single elements would not fit.
    """
    assert plan.max_workspace_bytes is not None
    budget = plan.max_workspace_bytes // 2
    rounds = 1
    for messages in _messages_by_rank(plan, stage, partial_index):
        total = sum(messages)
        # Cutting can leave one element of each message too much in a round.
        room = budget // plan.itemsize - len(messages)
        if total > room + len(messages):
            if room < 1:
                least = 2 * (len(messages) + 1) * plan.itemsize
                raise PlanError(
                    Problem(
                        "invalid-argument",
                        "max_workspace_bytes",
                        found=f"{plan.max_workspace_bytes} bytes for {len(messages)} messages of a rank",
                        hint=f"allow at least {least} bytes; a megabyte or more keeps the number of rounds small",
                    )
                )
            rounds = max(rounds, -(-total // room))
    return rounds


def _messages_by_rank(plan: Plan, stage: int, partial_index: int | None) -> list[list[int]]:
    """For each rank, the elements of every message it sends or receives in the stage."""
    key = ("messages", stage, partial_index)
    cache = plan.__dict__.setdefault("_messages", {})
    if key not in cache:
        pairs: dict[tuple[int, int], int] = {}
        for copy in all_ranks_copies(plan):
            chosen = copy.stage == stage and partial_index in (None, copy.partial_index)
            if chosen and copy.src_rank != copy.dst_rank:
                pair = copy.src_rank, copy.dst_rank
                pairs[pair] = pairs.get(pair, 0) + copy.numel
        by_rank: list[list[int]] = [[] for _ in range(plan.world_size)]
        for (src, dst), size in pairs.items():
            by_rank[src].append(size)
            by_rank[dst].append(size)
        cache[key] = by_rank
    found: list[list[int]] = cache[key]
    return found


def row_major_boxes(sizes: Index, begin: int, end: int) -> Iterator[tuple[Index, Index]]:
    """The boxes that elements ``begin`` to ``end`` (row-major) of a box of ``sizes`` make up, in order."""
    if begin >= end:
        return
    if begin == 0 and end == prod(sizes):
        yield (0,) * len(sizes), sizes
        return
    inner = prod(sizes[1:])
    first, last = begin // inner, (end - 1) // inner
    if inner == 1:
        yield (begin,) + (0,) * (len(sizes) - 1), (end - begin,) + (1,) * (len(sizes) - 1)
        return
    if first == last:
        for offset, part in row_major_boxes(sizes[1:], begin - first * inner, end - first * inner):
            yield (first, *offset), (1, *part)
        return
    if begin % inner:
        for offset, part in row_major_boxes(sizes[1:], begin - first * inner, inner):
            yield (first, *offset), (1, *part)
        first += 1
    whole_end = end // inner
    if whole_end > first:
        yield (first,) + (0,) * (len(sizes) - 1), (whole_end - first, *sizes[1:])
    if end % inner:
        for offset, part in row_major_boxes(sizes[1:], 0, end - whole_end * inner):
            yield (whole_end, *offset), (1, *part)
