"""The rule by which each full matrix of an optimizer gets one owner rank; a plan on numbers, equal on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from math import prod


def update_work(shape: Sequence[int]) -> int:
    """Return the multiplications of an update such as Newton-Schulz: m n min(m, n); else the element count."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    return rows * columns * min(rows, columns)


def owners_of(
    costs: Sequence[tuple[int, int]],
    full_on: Sequence[Collection[int]],
    world_size: int,
    allowed: Collection[int],
    fixed: Sequence[int | None],
) -> list[int]:
    """Give each matrix, the longest update first, to the least loaded rank.

    A rank's load is the larger of its share of all updates and its share of all memory. A matrix that lies in full on
    some ranks (an expert of expert parallelism) stays on the least loaded of these: its gradient is not sent.

    Args:
        costs: Multiplications of an update and bytes, of each matrix.
        full_on: Ranks that hold all of each matrix.
        world_size: Number of ranks.
        allowed: Ranks that may own matrices.
        fixed: Owner of each matrix that the caller chose, else None. Their loads count before any other's.

    Returns:
        The owner of each matrix.
    """
    work, memory = (sum(each) or 1 for each in zip(*costs, strict=True)) if costs else (1, 1)
    done, held, loads = [0] * world_size, [0] * world_size, [0.0] * world_size
    heap, owners = [(0.0, rank) for rank in sorted(allowed)], [0] * len(costs)
    longest_first = sorted(range(len(costs)), key=lambda at: (fixed[at] is None, -costs[at][0], -costs[at][1], at))
    for at in longest_first:
        rank = fixed[at]
        if rank is None and 0 < len(full_on[at]) < len(allowed):
            rank = min(set(full_on[at]).intersection(allowed), key=lambda each: (loads[each], each), default=None)
        if rank is None:
            while heap[0][0] != loads[heap[0][1]]:  # an entry from before that rank's last matrix
                heapq.heappop(heap)
            rank = heap[0][1]
        owners[at] = rank
        done[rank] += costs[at][0]
        held[rank] += costs[at][1]
        loads[rank] = max(done[rank] / work, held[rank] / memory)
        if rank in allowed:
            heapq.heappush(heap, (loads[rank], rank))
    return owners
