"""Build plans from users' arguments."""

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
    """Plan the move of a tensor from one layout to another, without process group or data.

    Args:
        shape: Global shape; None if one of the layouts has one (a DTensor, boxes).
        dtype: The source's dtype, or its name.
        src: Layout of the source, see `LayoutLike`. Ranks are ranks of one union group.
        dst: Layout of the destination.
        out_dtype: The destination's dtype; None: the source's. Values are cast on the side that sends fewer bytes.
        max_workspace_bytes: The most bytes of buffers on a rank; more than one collective if needed. float32
            accumulators for half precision come on top: ``workspace_bytes(rank)`` of the plan includes them.

    Returns:
        A plan with ``explain()``, ``digest``, ``to_json()``, ``bytes_matrix``, ``lower_bound``, ``transpose()``.

    Raises:
        PlanError: With every hole and overlap of the layouts by name, and any other reason against execution.
    """
    if not isinstance(shape, Sequence | None):
        hint = "pass sizes: the order is plan_reshard(shape, dtype, src, dst)"  # type: ignore[unreachable]  # callers are untyped
        raise PlanError(Problem("wrong-type", "shape", found=repr(shape), hint=hint))
    out = None if out_dtype is None else dtype_name(out_dtype)
    return cached_plan(*resolve_layouts(shape, src, dst), dtype_name(dtype), out, _whole_bytes(max_workspace_bytes))


def resolve_layouts(
    shape: Sequence[int] | None, src: LayoutLike, dst: LayoutLike, to_group: ToGroup | None = None
) -> tuple[ShardMap, ShardMap]:
    """Resolve both layouts for one shape; the problems of both are in one error."""
    sides, bound, problems = {"src": src, "dst": dst}, dict[str, ShardMap](), dict[str, list[Problem]]()
    for name in ("src", "dst", "src"):  # src again, if only dst has the shape
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
    """Return a bound as a Python int: cached plans are compared by equality, and sent as JSON."""
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
    """Build a validated plan between two shard maps."""
    if src.shape != dst.shape:
        reason = f"source of {src.shape}, destination of {dst.shape}"
        raise PlanError(Problem("shape-mismatch", found=reason, hint="both layouts are of one global tensor"))
    names = dtype_name(dtype), dtype_name(dtype if out_dtype is None else out_dtype)
    plan = ReshardPlan(src.shape, *names, src, dst, _whole_bytes(max_workspace_bytes))
    check_plan(plan)
    return plan


cached_plan = lru_cache(maxsize=4096)(make_plan)  # one object for equal arguments
