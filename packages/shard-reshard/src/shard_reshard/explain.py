"""A plan in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_reshard.plan import ReshardPlan

_MATRIX_RANKS = 16  # larger worlds print their busiest ranks instead of all pairs
_BUSIEST = 8


def explain(plan: ReshardPlan, name: str | None = None) -> str:
    """Who sends what to whom, bytes against the bound, and memory."""
    lines = [_headline(plan, name), f"  from  {plan.src.describe()}", f"  to    {plan.dst.describe()}"]
    if plan.stays:
        lines.append("  nothing is sent: every rank has what it needs")
        return "\n".join(lines)
    bound = plan.lower_bound
    ratio = f"{plan.wire_bytes / bound:.2f} x the lower bound of {human(bound)}" if bound else "lower bound 0"
    lines.append(f"  wire  {human(plan.wire_bytes)} as {plan.wire_dtype}, {ratio}")
    lines.append(f"  how   {how(plan)}")
    ranks = range(plan.world_size)
    busiest = max(ranks, key=lambda rank: plan.peak_bytes(rank))
    lines.append(f"  peak  {human(plan.peak_bytes(busiest))} on rank {busiest}, result and buffers")
    lines += _matrix(plan) if plan.world_size <= _MATRIX_RANKS else _top(plan)
    return "\n".join(lines)


def how(plan: ReshardPlan) -> str:
    """The collectives, in words."""
    steps = num_steps(plan)
    text = "one all-to-all" if steps == 1 else f"{steps} all-to-alls"
    if plan.relays:
        text += ", the last to pass parts on among replicas"
    if plan.reduce_op is not None:
        text += f", {plan.src.num_addends} addends reduced by {plan.reduce_op} in rank order"
    if plan.max_workspace_bytes is not None:
        text += f", in rounds of buffers within {human(plan.max_workspace_bytes)}"
    return text


def num_steps(plan: ReshardPlan) -> int:
    """Number of collectives."""
    from shard_reshard.program import build_program

    return sum(step.exchanges for step in build_program((plan,), 0, plan.world_size).steps)


def _headline(plan: ReshardPlan, name: str | None) -> str:
    shape = " x ".join(map(str, plan.shape)) or "scalar"
    dtype = plan.dtype if plan.dtype == plan.out_dtype else f"{plan.dtype} -> {plan.out_dtype}"
    what = "gradient of a reshard" if plan.adjoint else "reshard"
    return f"{name + ': ' if name else ''}{what} of {shape} {dtype}, plan {plan.digest[:12]}"


def _matrix(plan: ReshardPlan) -> list[str]:
    rows = [["to " + str(rank) for rank in range(plan.world_size)]]
    rows += [[human(value) if value else "-" for value in row] for row in plan.bytes_matrix]
    width = max(len(cell) for row in rows for cell in row)
    heads = [" " * 11] + [f"  from {rank:<4}" for rank in range(plan.world_size)]
    return [head + "  ".join(f"{cell:>{width}}" for cell in row) for head, row in zip(heads, rows, strict=True)]


def _top(plan: ReshardPlan) -> list[str]:
    matrix = plan.bytes_matrix
    sent = [(sum(row), rank) for rank, row in enumerate(matrix)]
    received = [(sum(row[rank] for row in matrix), rank) for rank in range(plan.world_size)]
    lines = []
    for word, found in (("sends", sent), ("receives", received)):
        top = sorted(found, key=lambda entry: (-entry[0], entry[1]))[:_BUSIEST]
        listed = ", ".join(f"rank {rank} {human(size)}" for size, rank in top)
        lines.append(f"  {word} most: {listed}")
    return lines


def human(num_bytes: int) -> str:
    """Bytes for people: ``"1.5 MiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
