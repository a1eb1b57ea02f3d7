"""``shard-spec search``: one table of meshes and planners for a number of ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError
from shard_spec._shared.progress import each_shown
from shard_spec.cli.sources import batch_of, limit_of, load, optimizer_of, step_options, topology_of
from shard_spec.cli.usage import UsageError
from shard_spec.formatting import Table
from shard_spec.layout.mesh import MeshSpec
from shard_spec.planners import FullyShardPlanner, LayoutPlanner, MegatronPlanner, compose
from shard_spec.sharding_plan import ShardingPlan

_MAX_RANKS = 1 << 17


@dataclass(frozen=True)
class Candidate:
    """A mesh with its planners, and what a step costs on the fullest rank.

    Attributes:
        mesh: Text of the mesh.
        planner: ``"replicate"``, ``"fsdp"``, ``"megatron"`` or ``"megatron+fsdp"``.
        peak_bytes: Bytes on the fullest rank; None if the combination was refused.
        moment: Phase of the peak; ``""`` without a batch.
        sent_bytes: Bytes that a rank sends in a step.
        seconds: Least and most time of the step, with a topology and a batch.
        fits: True if the peak is within the limit; None without a limit.
        refused: Reason why this combination is none.
        assumptions: What its numbers assume, a line each.
    """

    mesh: str
    planner: str
    peak_bytes: int | None = None
    moment: str = ""
    sent_bytes: float = 0.0
    seconds: tuple[float, float] | None = None
    fits: bool | None = None
    refused: str = ""
    assumptions: tuple[str, ...] = ()


def run_search(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec search``: print the table, best first; status 1 if nothing fits."""
    if not 1 <= arguments.ranks <= _MAX_RANKS:
        raise UsageError(f"--ranks {arguments.ranks}: a number from 1 to {_MAX_RANKS}")
    model = load(arguments)
    if not isinstance(model, nn.Module):
        raise UsageError("a planner reads modules, a safetensors file has tensors alone: name a config.json or a model")
    combinations = _combinations(arguments.ranks)
    shown = each_shown("search", combinations, len(combinations), lambda each: f"{each[1]} on {each[0]}")
    rows = sorted((_cost(model, *each, arguments) for each in shown), key=_rank)
    fits = any(row.fits is not False and row.peak_bytes is not None for row in rows)
    if arguments.json:
        print(json.dumps({"ranks": arguments.ranks, "candidates": [asdict(row) for row in rows]}, indent=1))
        return 0 if fits else 1
    print(
        Table(
            ["mesh", "planner", "fits", "peak of a rank", "at", "sent by a rank", "step"],
            [_cells(r) for r in rows],
            (3, 5, 6),
        )
    )
    lines = dict.fromkeys(line for row in rows for line in row.assumptions)
    for line in (*lines, *(f"{row.mesh} {row.planner}: {row.refused}" for row in rows if row.refused)):
        print(f"- {line}")
    print(_verdict(rows, arguments))
    return 0 if fits else 1


def _combinations(ranks: int) -> list[tuple[dict[str, int], str]]:
    """Return meshes of ``ranks`` ranks by their axes, each with a planner: data beside tensor parallelism."""
    combinations = []
    for tp in (size for size in range(1, ranks + 1) if ranks % size == 0):
        mesh = {axis: size for axis, size in {"dp": ranks // tp, "tp": tp}.items() if size > 1} or {"dp": 1}
        model = ["megatron"] if tp > 1 else []
        combinations.append((mesh, "+".join(model) or "replicate"))
        if "dp" in mesh and ranks > 1:
            combinations.append((mesh, "+".join([*model, "fsdp"])))
    return combinations


def _cost(model: nn.Module, axes: dict[str, int], planner: str, arguments: argparse.Namespace) -> Candidate:
    mesh, text = MeshSpec(axes), ", ".join(f"{axis}={size}" for axis, size in axes.items())
    planners: list[LayoutPlanner] = [MegatronPlanner(mesh)] if "megatron" in planner else []
    planners += [FullyShardPlanner(mesh, "dp")] if "fsdp" in planner else []
    batch, limit, topology, options = (
        batch_of(arguments),
        limit_of(arguments),
        topology_of(arguments),
        step_options(arguments),
    )
    try:
        plan: ShardingPlan = compose(*planners).build_plan(model) if planners else ShardingPlan({}, mesh=mesh)
        sharding = {axis for layout in plan.resolve(model).values() for axis in layout.sharded_axes}
        if "tp" in axes and "tp" not in sharding:
            return Candidate(text, planner, refused=f"no tensor that tp={axes['tp']} could shard")
        memory = plan.memory(
            model, optimizer=optimizer_of(arguments), dtype=arguments.dtype, data_axes=options["data_axes"]
        )
        if limit is not None and memory.max_bytes > limit:  # before a step is simulated
            return Candidate(text, planner, memory.max_bytes, fits=False)
        if batch is None:
            moved = plan.communication(model, optimizer=optimizer_of(arguments), topology=topology, **options)
        else:
            memory, moved = plan.cost(model, batch, optimizer=optimizer_of(arguments), topology=topology, **options)
    except PlanError as error:
        if any(problem.code not in ("does-not-divide", "conflicting-arguments") for problem in error.problems):
            raise
        return Candidate(text, planner, refused=error.problems[0].found)
    fits = None if limit is None else memory.max_bytes <= limit
    notes = tuple(dict.fromkeys((*memory.notes, *memory.assumptions, *moved.assumptions)))
    return Candidate(
        text, planner, memory.max_bytes, memory.moment, moved.sent_bytes, moved.step_seconds, fits, "", notes
    )


def _rank(row: Candidate) -> Any:
    """Order: what fits, by the most time of a step, then by bytes sent, then by peak; refused ones last."""
    time = row.seconds[1] if row.seconds else row.sent_bytes
    return row.peak_bytes is None, row.fits is False, time, row.peak_bytes or 0, row.mesh


def _cells(row: Candidate) -> list[str]:
    if row.peak_bytes is None:
        return [row.mesh, row.planner, "refused", "", "", "", ""]
    time = "" if row.seconds is None else f"{row.seconds[0]:.3g} to {row.seconds[1]:.3g} s"
    fits = {None: "", True: "yes", False: "no"}[row.fits]
    return [
        row.mesh,
        row.planner,
        fits,
        human_bytes(row.peak_bytes),
        row.moment or "state",
        human_bytes(int(row.sent_bytes)),
        time,
    ]


def _verdict(rows: list[Candidate], arguments: argparse.Namespace) -> str:
    good = [row for row in rows if row.peak_bytes is not None]
    if not good:
        return "no combination can be planned"
    if good[0].fits is False:
        least = min(good, key=lambda row: row.peak_bytes or 0)
        ways = "more ranks" if arguments.checkpointing or not arguments.batch else "--checkpointing, or more ranks"
        size = human_bytes(least.peak_bytes or 0)
        return f"nothing fits: the least is {size} with {least.planner} on {least.mesh}; try {ways}"
    counted = "" if arguments.batch else "; activations are not counted: pass --batch"
    by = "time" if good[0].seconds else "bytes sent"
    mesh, planner = good[0].mesh.replace(" ", ""), good[0].planner
    named = "" if planner == "replicate" else f" --planner {planner}"
    return f"first by {by}: shard-spec plan {arguments.model} --mesh {mesh}{named}{counted}"
