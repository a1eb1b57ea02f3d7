"""Exchanges between ranks: decisions, and tensors of any dtype and layout as exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist

from shard_spec._shared.consensus import as_bytes, assert_consistent, problems_of
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout

T = TypeVar("T")


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            Problem(
                "no-process-group",
                found="torch.distributed is not initialized",
                hint="call torch.distributed.init_process_group first; planning needs no process group",
            )
        )
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise PlanError(
            Problem(
                "rank-outside-mesh",
                "process_group",
                found=f"rank {dist.get_rank()} is not in the process group it passed",
                hint="call it on members only",
            )
        )
    return group


def on_all_ranks(
    group: dist.ProcessGroup, subject: str, work: Callable[[], T], lines: Callable[[T], Sequence[str]] = lambda _: ()
) -> T:
    """Return what ``work`` gives once it succeeded, with equal ``lines`` about it, on every rank. A collective.

    ``work`` sends nothing. What it raises on one rank, all ranks raise: a PlanError with the problems of all ranks, or
    ``ranks-disagree`` with the different lines.
    """
    facts: Sequence[str] = ()
    error = None
    try:
        value = work()
        facts = lines(value)
    except Exception as failure:  # this rank still meets its peers
        error = PlanError(problems_of(failure))
    assert_consistent(group, subject, facts, error, hint="pass the same to every rank of the group")
    return value


def source_problems(src_rank: object, size: int) -> list[Problem]:
    """Report a source that is no rank of the group."""
    if isinstance(src_rank, int) and not isinstance(src_rank, bool) and 0 <= src_rank < size:
        return []
    return [Problem("invalid-argument", "src_rank", found=repr(src_rank), hint=f"a rank in the group, 0 to {size - 1}")]


def take(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The shard of ``full`` that lies on global rank ``rank``. A view where it is one box."""
    shard = full.detach()
    for dim, intervals in enumerate(layout.intervals(rank, tuple(full.shape))):
        parts = [shard.narrow(dim, start, size) for start, size in intervals]
        shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return shard


def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, src: int) -> torch.Tensor:
    """Fill a contiguous tensor with what rank ``src`` of the group has in it."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), group=group, group_src=src)
    return tensor


def gather_shards(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """The whole tensor on every rank, from the shards of a layout without partial sums. One collective."""
    ranks = dist.get_process_group_ranks(group)
    numels = [prod(layout.local_shape(rank, shape)) for rank in ranks]
    most = max(numels)
    mine = local.new_empty(most)
    mine[: local.numel()] = local.detach().reshape(-1)
    every = local.new_empty(most * len(ranks))
    if most:
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        all_gather(as_bytes(every), as_bytes(mine), group=group)
    full = local.new_empty(shape)
    for rank, numel, padded in zip(ranks, numels, torch.split(every, most or 1), strict=False):
        shard = padded[:numel].view(layout.local_shape(rank, shape))
        for box, part in zip(layout.boxes(rank, shape), split(shard, layout, rank, shape), strict=True):
            full[box.slices()] = part
    return full


def split(local: torch.Tensor, layout: Layout, rank: int, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Split the local tensor of ``rank`` into views of its boxes, in their order."""
    views = [local]
    for dim, intervals in enumerate(layout.intervals(rank, shape)):
        sizes = [size for _, size in intervals]
        views = [part for view in views for part in torch.split(view, sizes, dim)]
    return tuple(view for view in views if view.numel())
