"""Execution of a plan for all ranks in one process: for tests, documentation and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shard_reshard._shared.problems import raise_problems
from shard_reshard.execution.checks import Shards, as_list, as_result, local_problems
from shard_reshard.execution.exchange import Exchange
from shard_reshard.lowering import build_program
from shard_reshard.planning import ReshardPlan


def simulate(plan: ReshardPlan, shards: Sequence[Shards]) -> list[Shards]:
    """Return the tensors of every rank after the plan.

    Packs, routes and unpacks exactly as ranks do; only the collective is replaced by copies.

    Args:
        plan: From `plan_reshard`.
        shards: For each rank its local tensor, a sequence of tensors for several boxes, or None.

    Returns:
        The same for each rank, in the destination layout.

    Raises:
        PlanError: ``shape-mismatch`` and ``dtype-mismatch`` for shards that contradict the source layout.
    """
    world_size = max(plan.world_size, len(shards))
    sources = [as_list(shards[rank] if rank < len(shards) else None) for rank in range(world_size)]
    problems = [p for rank in range(world_size) for p in local_problems(plan, rank, sources[rank])]
    raise_problems(problems)
    posted: list[list[Any]] = [[] for _ in range(world_size)]  # by each rank, in place of a collective
    outs, waiting = [], []
    device = next((tensor.device for tensors in sources for tensor in tensors), torch.device("cpu"))
    with torch.no_grad():
        for rank in range(world_size):
            exchange = Exchange(build_program((plan,), rank, world_size))
            outs.append(exchange.allocate(device))
            call = exchange.prepare(sources[rank], outs[rank], device)
            waiting.append(call.steps(lambda *message, own=posted[rank]: own.append(message)))
        while waiting:
            waiting = [steps for steps in waiting if next(steps, None) is not None]
            deliver(posted)  # all ranks have posted this step
    return [as_result(plan.dst.local_shapes(rank), outs[rank]) for rank in range(world_size)]


def deliver(posted: Sequence[list[Any]]) -> None:
    """Carry out all-to-alls: from each rank's list, output, input, splits of both, and what else a collective takes."""
    for calls in zip(*posted, strict=True):
        sent = [input.split(splits) for _, input, _, splits, *_ in calls]
        for rank, (output, _, splits, *_) in enumerate(calls):
            for peer, place in enumerate(output.split(splits)):
                place.copy_(sent[peer][rank])
    for of_rank in posted:
        of_rank.clear()
