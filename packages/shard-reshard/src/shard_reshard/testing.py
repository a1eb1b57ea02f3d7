"""Execution of a plan for all ranks in one process: for tests, documentation and experiments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shard_reshard._shared.problems import PlanError
from shard_reshard.execution.checks import Shards, as_list, as_result, local_problems
from shard_reshard.execution.exchange import Collective, Exchange
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
    if problems:
        raise PlanError(problems)
    mail = _Mail(world_size)
    outs, running = [], []
    device = next((tensor.device for tensors in sources for tensor in tensors), torch.device("cpu"))
    with torch.no_grad():
        for rank in range(world_size):
            exchange = Exchange(build_program((plan,), rank, world_size))
            outs.append(exchange.allocate(device))
            call = exchange.prepare(sources[rank], outs[rank], device)
            running.append(call.steps(mail.collective(rank)))
        waiting = running
        while waiting:
            waiting = [steps for steps in waiting if next(steps, None) is not None]
            mail.write_outputs()  # all ranks have posted this step
    return [as_result(plan.dst.local_shapes(rank), outs[rank]) for rank in range(world_size)]


class _Mail:
    """Stand-in for the collective: collects messages until every rank has posted."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.posted: list[list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]]]
        self.posted = [[] for _ in range(world_size)]

    def collective(self, rank: int) -> Collective:
        def post(
            output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
        ) -> dist.Work | None:
            self.posted[rank].append((output, input, output_splits, input_splits))
            return None

        return post

    def write_outputs(self) -> None:
        for calls in zip(*self.posted, strict=True):
            sent = [call[1].split(call[3]) for call in calls]
            for rank, (output, _, splits, _) in enumerate(calls):
                for peer, place in enumerate(output.split(splits)):
                    place.copy_(sent[peer][rank])
        for calls_of_rank in self.posted:
            calls_of_rank.clear()
