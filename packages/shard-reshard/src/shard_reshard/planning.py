"""Plans as callers make and read them: built from what they write, with reports.

`plan_reshard` resolves layouts and makes a checked plan. `ReshardPlan` adds what callers ask: bytes on each link, the
lower bound, memory, a text. Its base is in `plan`; scheduling, lowering and execution need no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from operator import add, index, sub
from typing import TYPE_CHECKING, Any

from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import ITEMSIZES, ShardMap, dtype_name, human
from shard_reshard.lowering import buffer_bytes, build_program
from shard_reshard.plan import (
    Plan,
    RankSchedule,
    all_ranks_copies,
    check_plan,
    crossings,
    is_local,
    rank_schedule,
    receivers_of,
)

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
    hosts: int | Sequence[Any] | None = None,
) -> ReshardPlan:
    """Plan a tensor's move from one layout to another, without process group or data.

    Args:
        shape: Global shape; None if one of the layouts has one (a DTensor, boxes).
        dtype: The source's dtype, or its name.
        src: Layout of the source, see `LayoutLike`. Ranks are ranks of one union group.
        dst: Layout of the destination.
        out_dtype: The destination's dtype; None: the source's. Values are cast on the side that sends fewer bytes.
        max_workspace_bytes: The most bytes of buffers on a rank; more than one collective if needed. float32
            accumulators for half precision come on top: ``workspace_bytes(rank)`` of the plan includes them.
        hosts: The number of ranks of a host, or the host of each rank in any form that compares (``["a", "a", "b"]``).
            Then values come from a rank on the receiver's host where one has them, and a host whose ranks all lack a
            value gets one copy, which its ranks pass on: ``host_bytes`` is ``host_lower_bound`` for layouts without
            partial values. None: all links are alike.

    Returns:
        A plan with ``explain()``, ``digest``, ``to_json()``, ``bytes_matrix``, ``lower_bound``, ``transpose()``.

    Raises:
        PlanError: With every hole and overlap of the layouts by name, and any other reason against execution.
    """
    if not isinstance(shape, Sequence | None):
        hint = "pass sizes: the order is plan_reshard(shape, dtype, src, dst)"  # type: ignore[unreachable]  # callers are untyped
        raise refusal("wrong-type", "shape", found=repr(shape), hint=hint)
    out = None if out_dtype is None else dtype_name(out_dtype)
    layouts = resolve_layouts(shape, src, dst)
    numbered = None if hosts is None else _numbered_hosts(hosts, *layouts)
    return cached_plan(*layouts, dtype_name(dtype), out, max_workspace_bytes, numbered)


def _numbered_hosts(hosts: int | Sequence[Any], src: ShardMap, dst: ShardMap) -> tuple[int, ...] | None:
    """Return the host of each rank of both layouts as a number; None where all ranks are on one host."""
    size = max((max(side.ranks, default=-1) for side in (src, dst)), default=-1) + 1
    if isinstance(hosts, int) and hosts > 0:
        listed: Sequence[Any] = [rank // hosts for rank in range(size)]
    elif isinstance(hosts, Sequence) and not isinstance(hosts, str) and len(hosts) >= size:
        listed = hosts[:size]
    else:
        raise refusal(
            "invalid-argument",
            "hosts",
            found=f"{hosts!r:.100} for {size} ranks",
            hint="pass the number of ranks of a host, or a list with the host of each rank",
        )
    order = {host: number for number, host in enumerate(dict.fromkeys(listed))}
    return tuple(order[host] for host in listed) if len(order) > 1 else None


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


def make_plan(
    src: ShardMap,
    dst: ShardMap,
    dtype: torch.dtype | str,
    out_dtype: torch.dtype | str | None = None,
    max_workspace_bytes: int | None = None,
    hosts: tuple[int, ...] | None = None,
    bucket_bytes: int | None = None,
) -> ReshardPlan:
    """Build a validated plan between two shard maps; a tensor larger than ``bucket_bytes`` moves in rounds."""
    if src.shape != dst.shape:
        raise refusal(
            "shape-mismatch",
            found=f"source of {src.shape}, destination of {dst.shape}",
            hint="both layouts are of one global tensor",
        )
    names = dtype_name(dtype), dtype_name(dtype if out_dtype is None else out_dtype)
    try:  # a Python int: cached plans are compared by equality, and sent as JSON
        limit = None if max_workspace_bytes is None else index(max_workspace_bytes)
    except TypeError:
        reason, hint = repr(max_workspace_bytes), "a whole number of bytes, or None"
        raise refusal("invalid-argument", "max_workspace_bytes", found=reason, hint=hint) from None
    if bucket_bytes is not None and (src.largest + dst.largest) * max(map(ITEMSIZES.__getitem__, names)) > bucket_bytes:
        limit = bucket_bytes
    plan = ReshardPlan(src.shape, *names, src, dst, limit, hosts=hosts)
    check_plan(plan)
    return plan


cached_plan = lru_cache(maxsize=4096)(make_plan)  # one object for equal arguments


class ReshardPlan(Plan):
    """Plan of one tensor from one layout to another, built by `plan_reshard`."""

    def rank_schedule(self, rank: int) -> tuple[RankSchedule, ...]:
        """Return the sends, receives and local copies of ``rank`` by stage."""
        return rank_schedule(self, rank)

    # ---- how much ---------------------------------------------------------------------------------------------

    @cached_property
    def bytes_matrix(self) -> tuple[tuple[int, ...], ...]:
        """Bytes sent from each rank (row) to each rank (column); local copies are not counted."""
        matrix = [[0] * self.world_size for _ in range(self.world_size)]
        for copy in all_ranks_copies(self):
            if copy.src_rank != copy.dst_rank:
                matrix[copy.src_rank][copy.dst_rank] += copy.numel * self.itemsize
        return tuple(map(tuple, matrix))

    @cached_property
    def wire_bytes(self) -> int:
        """Total bytes sent."""
        return sum(map(sum, self.bytes_matrix))

    @cached_property
    def lower_bound(self) -> int:
        """Minimum bytes for any algorithm: see docs/design/shard-reshard.md."""
        if self.adjoint:
            return self.transpose().lower_bound  # the same bytes, reversed
        if self.is_identity:
            return 0
        elements = 0
        for src, dst in crossings(self):
            receivers = set(receivers_of(self, dst))
            size = prod(map(sub, src.stop, src.start))
            if len(src.owners) == 1:
                elements += size * len(receivers.difference(src.owners[0]))
            else:
                # A reduction of k addends and a broadcast to n ranks are a tree over all of them.
                meets = any(receivers.intersection(ranks) for ranks in src.owners)
                elements += size * (len(src.owners) + len(receivers) - (2 if meets else 1))
        return elements * self.itemsize

    @cached_property
    def host_bytes(self) -> int:
        """Bytes sent between hosts; 0 without ``hosts``."""
        if (hosts := self.hosts) is None:
            return 0
        pairs = [(a, b) for a in range(self.world_size) for b in range(self.world_size) if hosts[a] != hosts[b]]
        return sum(self.bytes_matrix[a][b] for a, b in pairs)

    @cached_property
    def host_lower_bound(self) -> int:
        """Minimum bytes between hosts for any algorithm: each host that lacks a value receives it once."""
        if self.adjoint:
            return self.transpose().host_lower_bound
        if (hosts := self.hosts) is None or self.is_identity:
            return 0
        elements = 0
        for src, dst in crossings(self):
            receiving = {hosts[rank] for rank in receivers_of(self, dst)}
            holding = [{hosts[rank] for rank in ranks} for ranks in src.owners]
            lacking = sum(not all(host in hosts_of for hosts_of in holding) for host in receiving)
            # An addend on one host alone reaches every receiving host: transfers connect all of these.
            alone = {host for hosts_of in holding if len(hosts_of) == 1 for host in hosts_of}
            links = max(lacking, len(receiving | alone) - 1 if alone else 0)
            elements += prod(map(sub, src.stop, src.start)) * links
        return elements * self.itemsize

    def workspace_bytes(self, rank: int) -> int:
        """Return the peak bytes of temporary buffers on ``rank`` for contiguous tensors."""
        return buffer_bytes(build_program((self,), rank, self.world_size))

    def peak_bytes(self, rank: int) -> int:
        """Return the peak bytes on ``rank`` beside its sources: result and buffers."""
        out = sum(map(prod, self.dst.local_shapes(rank))) * ITEMSIZES[self.out_dtype]
        return out + self.workspace_bytes(rank)

    def explain(self, name: str | None = None) -> str:
        """Return the plan in words and numbers; ``name`` heads the text."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        dtype = self.dtype if self.dtype == self.out_dtype else f"{self.dtype} -> {self.out_dtype}"
        what = f"{name + ': ' if name else ''}{'gradient of a reshard' if self.adjoint else 'reshard'}"
        lines = [f"{what} of {shape} {dtype}, plan {self.digest[:12]}"]
        lines += [f"  from  {self.src.describe()}", f"  to    {self.dst.describe()}"]
        if is_local(self):
            lines.append("  nothing is sent: every rank has what it needs")
            return "\n".join(lines)
        bound = self.lower_bound
        ratio = f"{self.wire_bytes / bound:.2f} x the lower bound of {human(bound)}" if bound else "lower bound 0"
        lines.append(f"  wire  {human(self.wire_bytes)} as {self.wire_dtype}, {ratio}")
        if self.hosts is not None:
            least, between = self.host_lower_bound, self.host_bytes
            ratio = f"{between / least:.2f} x the lower bound of {human(least)}" if least else "lower bound 0"
            lines.append(f"  hosts {human(between)} between {len(set(self.hosts))} hosts, {ratio}")
        steps = sum(step.exchanges for step in build_program((self,), 0, self.world_size).steps)
        how = "one all-to-all" if steps == 1 else f"{steps} all-to-alls"
        if self.uses_scatter_allgather:
            how += ", the last to pass parts on among replicas"
        if self.reduce_op is not None:
            how += f", {self.src.num_partials} addends reduced by {self.reduce_op} in rank order"
        if self.max_workspace_bytes is not None:
            how += f", in rounds of buffers within {human(self.max_workspace_bytes)}"
        lines.append(f"  how   {how}")
        busiest = max(range(self.world_size), key=self.peak_bytes)
        lines.append(f"  peak  {human(self.peak_bytes(busiest))} on rank {busiest}, result and buffers")
        matrix, ranks = self.bytes_matrix, range(self.world_size)
        if self.world_size <= _MATRIX_RANKS:
            rows = [[f"to {rank}" for rank in ranks], *([human(n) if n else "-" for n in row] for row in matrix)]
            width = max(len(cell) for row in rows for cell in row)
            heads = [" " * 11, *(f"  from {rank:<4}" for rank in ranks)]
            cells = ["  ".join(f"{cell:>{width}}" for cell in row) for row in rows]
            return "\n".join([*lines, *map(add, heads, cells)])
        for word, num_bytes in (("sends", map(sum, matrix)), ("receives", map(sum, zip(*matrix, strict=True)))):
            top = sorted(zip(num_bytes, ranks, strict=True), key=lambda entry: (-entry[0], entry[1]))[:_BUSIEST]
            lines.append(f"  {word} most: {', '.join(f'rank {rank} {human(size)}' for size, rank in top)}")
        return "\n".join(lines)


_MATRIX_RANKS = 16  # larger worlds print their busiest ranks, not all pairs
_BUSIEST = 8
