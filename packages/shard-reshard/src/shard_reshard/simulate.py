"""Carry out a plan for all ranks in one process: for tests, documentation and trying a layout out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shard_reshard.exchange import Collective, Exchange
from shard_reshard.plan import ReshardPlan
from shard_reshard.problems import PlanError, Problem
from shard_reshard.program import build_program

Shards = torch.Tensor | Sequence[torch.Tensor] | None


def simulate(plan: ReshardPlan, shards: Sequence[Shards]) -> list[Shards]:
    """What every rank would hold after the plan.

    Packs, routes and unpacks exactly as ranks do; only the collective itself is replaced by copies.

    Args:
        plan: From `plan_reshard`.
        shards: For each rank its local tensor, a sequence of tensors where its layout has several boxes, or None.

    Returns:
        For each rank the same, in the destination layout.

    Raises:
        PlanError: ``local-shape`` and ``local-dtype`` for shards that are not what the source layout says.
    """
    world_size = max(plan.world_size, len(shards))
    given = [as_list(shards[rank] if rank < len(shards) else None) for rank in range(world_size)]
    problems = [p for rank in range(world_size) for p in local_problems(plan, rank, given[rank])]
    if problems:
        raise PlanError(problems)
    mail = _Mail(world_size)
    outs, running = [], []
    device = next((tensor.device for tensors in given for tensor in tensors), torch.device("cpu"))
    with torch.no_grad():
        for rank in range(world_size):
            exchange = Exchange(build_program((plan,), rank, world_size))
            outs.append(exchange.allocate(device))
            running.append(exchange.steps(given[rank], outs[rank], mail.collective(rank), device))
        waiting = running
        while waiting:
            waiting = [steps for steps in waiting if next(steps, None) is not None]
            mail.deliver()
    return [as_result(plan.dst.local_shapes(rank), outs[rank]) for rank in range(world_size)]


class _Mail:
    """Stands in for the collective: messages lie here until every rank has brought its own."""

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

    def deliver(self) -> None:
        for calls in zip(*self.posted, strict=True):
            sent = [call[1].split(call[3]) for call in calls]
            for rank, (output, _, splits, _) in enumerate(calls):
                for peer, place in enumerate(output.split(splits)):
                    place.copy_(sent[peer][rank])
        for calls_of_rank in self.posted:
            calls_of_rank.clear()


def as_list(shards: Shards) -> list[torch.Tensor]:
    """Local tensors as a list, however few there are."""
    if shards is None:
        return []
    return [shards] if isinstance(shards, torch.Tensor) else list(shards)


def as_result(shapes: Sequence[object], tensors: Sequence[torch.Tensor]) -> Shards:
    """One tensor as itself, none as None, several as a list."""
    if len(shapes) == 1:
        return tensors[0]
    return list(tensors) if shapes else None


def local_problems(plan: ReshardPlan, rank: int, tensors: Sequence[torch.Tensor], side: str = "src") -> list[Problem]:
    """How the local tensors of ``rank`` differ from what the plan expects on ``side``."""
    shapes = plan.local_shapes(rank, side)
    dtype = plan.dtype if side == "src" else plan.out_dtype
    where = f"rank {rank}, {'source' if side == 'src' else 'out'}"
    if len(shapes) != len(tensors):
        found = f"{len(tensors)} local tensors, the layout has {len(shapes)}"
        return [Problem("local-count", where, found=found, hint=f"one tensor for each box, of shapes {shapes}")]
    problems = []
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        which = where if len(shapes) == 1 else f"{where} {number}"
        if tuple(tensor.shape) != shape:
            found = f"shape {tuple(tensor.shape)}, the layout of {plan.shape} says {shape}"
            hint = "pass the local tensor, and the global shape with shape="
            problems.append(Problem("local-shape", which, found=found, hint=hint))
        if str(tensor.dtype) != f"torch.{dtype}":
            found = f"{tensor.dtype}, the plan is for {dtype}"
            hint = "plan for this dtype, or pass dtype= to cast on the way"
            problems.append(Problem("local-dtype", which, found=found, hint=hint))
        if tensor.layout != torch.strided:
            found = f"a {tensor.layout} tensor"
            problems.append(Problem("local-layout", which, found=found, hint="only dense tensors can be moved"))
    return problems
