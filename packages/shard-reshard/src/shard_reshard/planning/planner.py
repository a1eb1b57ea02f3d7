"""From what users write to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import ShardMap, dtype_name
from shard_reshard.plan.plan import check_plan
from shard_reshard.planning.analyze import ReshardPlan

if TYPE_CHECKING:
    import torch


def plan_reshard(
    shape: Sequence[int] | None,
    dtype: torch.dtype | str,
    src: LayoutLike,
    dst: LayoutLike,
    *,
    out_dtype: torch.dtype | str | None = None,
    max_workspace_bytes: int | None = None,
) -> ReshardPlan:
    """Plan how a tensor gets from one layout to another. Pure: no process group, no tensor data.

    Args:
        shape: Global shape; None where one of the layouts tells it (a DTensor, boxes).
        dtype: The source's dtype, or its name.
        src: Where the tensor is, see `LayoutLike`. Ranks are ranks of one union group.
        dst: Where it is to be.
        out_dtype: The destination's dtype; None: the source's. Values are cast where fewer bytes travel.
        max_workspace_bytes: The most bytes of buffers on a rank; more than one collective where needed. The float32
            tensors in which halves are summed come on top: ``workspace_bytes(rank)`` of the plan counts them too.

    Returns:
        A plan with ``explain()``, ``digest``, ``to_json()``, ``bytes_matrix``, ``lower_bound``, ``transpose()``.

    Raises:
        PlanError: With every hole and overlap of the layouts by name, and whatever else cannot be carried out.
    """
    if not isinstance(shape, Sequence | None):
        hint = "pass sizes: the order is plan_reshard(shape, dtype, src, dst)"  # type: ignore[unreachable]  # callers are not checked
        raise PlanError(Problem("wrong-type", "shape", found=repr(shape), hint=hint))
    out = None if out_dtype is None else dtype_name(out_dtype)
    return cached_plan(*resolve_layouts(shape, src, dst), dtype_name(dtype), out, _whole_bytes(max_workspace_bytes))


def resolve_layouts(
    shape: Sequence[int] | None, src: LayoutLike, dst: LayoutLike, to_group: ToGroup | None = None
) -> tuple[ShardMap, ShardMap]:
    """Both layouts, bound to one shape; the problems of both in one error."""
    sides, bound, problems = {"src": src, "dst": dst}, dict[str, ShardMap](), dict[str, list[Problem]]()
    for name in ("src", "dst", "src"):  # again, where the destination alone tells the shape
        if name not in bound:
            try:
                bound[name] = resolve_layout(sides[name], shape, to_group)
                shape = bound[name].shape
                problems.pop(name, None)
            except PlanError as error:
                problems[name] = [p.named(name) for p in error.problems]
    if problems:
        raise PlanError(dict.fromkeys(p for listed in problems.values() for p in listed))
    return bound["src"], bound["dst"]


def _whole_bytes(given: int | None) -> int | None:
    """Return a bound as a number of Python: kept plans are found by equality, and travel as JSON."""
    try:
        return None if given is None else index(given)
    except TypeError:
        hint = "a whole number of bytes, or None"
        raise PlanError(Problem("invalid-argument", "max_workspace_bytes", found=repr(given), hint=hint)) from None


def make_plan(
    src: ShardMap,
    dst: ShardMap,
    dtype: torch.dtype | str,
    out_dtype: torch.dtype | str | None = None,
    max_workspace_bytes: int | None = None,
) -> ReshardPlan:
    """A checked plan between two bound layouts."""
    if src.shape != dst.shape:
        found = f"source of {src.shape}, destination of {dst.shape}"
        raise PlanError(Problem("shape-mismatch", found=found, hint="both layouts are of one global tensor"))
    names = dtype_name(dtype), dtype_name(dtype if out_dtype is None else out_dtype)
    plan = ReshardPlan(src.shape, *names, src, dst, _whole_bytes(max_workspace_bytes))
    check_plan(plan)
    return plan


cached_plan = lru_cache(maxsize=4096)(make_plan)  # the same object for the same question
