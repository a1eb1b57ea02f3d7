"""The commands: each loads its inputs, evaluates a plan, and prints.

``shard-spec search`` prints one table of meshes and planners for a number of ranks.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._shared.progress import each_shown
from shard_spec.cli.sources import (
    batch_of,
    data_axes_of,
    limit_of,
    load_model,
    optimizer_of,
    read_text,
    step_options,
    topology_of,
)
from shard_spec.cli.usage import UsageError
from shard_spec.estimate.memory import STEP_PARTS, Memory
from shard_spec.formatting import Table
from shard_spec.layout import DATA_ROLES, ROLE_BY_NAME, MeshSpec
from shard_spec.plan.resolve import ModelMetadata, metadata_of
from shard_spec.planners import (
    ExpertParallelPlanner,
    FullyShardPlanner,
    LayoutPlanner,
    MegatronPlanner,
    StagePlanner,
    compose,
)
from shard_spec.report import html_report, near_names
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
    model = load_model(arguments.model, dequantize=arguments.dequantize)
    if not isinstance(model, nn.Module):
        raise UsageError("a planner reads modules, a safetensors file has tensors alone: name a config.json or a model")
    combinations = _combinations(arguments.ranks)
    shown = each_shown("search", combinations, len(combinations), lambda each: f"{each[1]} on {each[0]}")
    metadata = metadata_of(model)  # read once for all
    rows = sorted((_cost(model, metadata, *each, arguments) for each in shown), key=_rank)
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


def _cost(
    model: nn.Module, metadata: ModelMetadata, axes: dict[str, int], planner: str, arguments: argparse.Namespace
) -> Candidate:
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
        sharding = {axis for layout in plan.resolve(metadata).values() for axis in layout.sharded_axes}
        if "tp" in axes and "tp" not in sharding:
            return Candidate(text, planner, refused=f"no tensor that tp={axes['tp']} could shard")
        memory = plan.memory(
            metadata, optimizer=optimizer_of(arguments), dtype=arguments.dtype, data_axes=options["data_axes"]
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
    except Exception as error:  # a forward of other inputs
        line = (str(error).splitlines() or [""])[0][:200]  # torch's errors have many lines
        return Candidate(
            text, planner, refused=f"forward on token ids {arguments.batch}: {type(error).__name__}: {line}"
        )
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
        # The state alone of a step that was not simulated, as it did not fit, is no peak beside those of steps.
        least = min(good, key=lambda row: (not row.moment, row.peak_bytes or 0))
        ways = "more ranks" if arguments.checkpointing or not arguments.batch else "--checkpointing, or more ranks"
        size = human_bytes(least.peak_bytes or 0)
        of = "" if least.moment else ", its state alone,"
        return f"nothing fits: the least is {size}{of} with {least.planner} on {least.mesh}; try {ways}"
    counted = "" if arguments.batch else "; activations are not counted: pass --batch"
    by = "time" if good[0].seconds else "bytes sent"
    mesh, planner = good[0].mesh.replace(" ", ""), good[0].planner
    named = "" if planner == "replicate" else f" --planner {planner}"
    return f"first by {by}: shard-spec plan {arguments.model} --mesh {mesh}{named}{counted}"


def run_plan(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec plan``: print the plan, its costs and problems (there should be none)."""
    if not arguments.mesh:
        raise UsageError("pass --mesh, for example --mesh dp=4,tp=2")
    model = load_model(arguments.model, dequantize=arguments.dequantize)
    try:
        mesh = MeshSpec.parse(arguments.mesh)
    except PlanError as error:
        raise UsageError(str(error)) from None
    plans, notes = _planned(arguments, mesh, model)
    metadata = metadata_of(model)
    plan = plans.compact(metadata)  # globs: a file for people
    if arguments.out:
        _write(arguments.out, plan.to_json())
    return _report(plan, model, arguments, plan.validate(metadata), notes)


def run_check(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec check``: print every problem, or else the plan's costs."""
    plan = ShardingPlan.from_json(read_text(arguments.plan))
    model = load_model(arguments.model, dequantize=arguments.dequantize)
    return _report(plan, model, arguments, plan.validate(metadata_of(model)), [])


def run_explain(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec explain``: print a plan in words."""
    plan = ShardingPlan.from_json(read_text(arguments.plan))
    metadata = (
        metadata_of(load_model(arguments.model, dequantize=True)) if arguments.model else None
    )  # rules alone have an explanation
    patterns = [rule.pattern for rule in plan.rules if rule.pattern is not None]
    if arguments.name and metadata is None and not any(each.matches(arguments.name) for each in patterns):
        raise PlanError(
            Problem(
                "unknown-name",
                arguments.name,
                found="no rule names such a tensor; if the model has it, it is replicated",
                hint=near_names(arguments.name, [each.text for each in patterns], "pass --model to look it up there"),
            )
        )
    text = plan.explain(arguments.name, metadata)
    print(json.dumps({"explanation": text, "digest": plan.digest}) if arguments.json else text)
    return 0


def run_diff(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec diff``: print the changes; status 1 if there are any."""
    before, after = (ShardingPlan.from_json(read_text(path)) for path in (arguments.before, arguments.after))
    metadata = metadata_of(load_model(arguments.model, dequantize=True)) if arguments.model else None
    difference = before.diff(after, metadata)
    print(difference.to_json() if arguments.json else difference)
    return 1 if difference else 0  # as in diff(1)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _planned(
    arguments: argparse.Namespace, mesh: MeshSpec, model: nn.Module | ModelMetadata
) -> tuple[ShardingPlan, list[Problem]]:
    if isinstance(model, ModelMetadata):
        hint = "name a config.json or MODULE:FACTORY, or write the rules and check them: shard-spec check FILE PLAN"
        raise UsageError(f"a planner reads modules, a safetensors file has tensors alone: {hint}")
    names = arguments.planner.split("+")  # composed in this order
    if names == ["auto"]:
        by_axis = ("stage", "pp"), ("megatron", "tp"), ("expert", "ep")
        names = [
            *(name for name, axis in by_axis if axis in mesh.axis_names),
            *(["fsdp"] if _data_axis(arguments, mesh) else []),
        ]
        by_role = {axis: _role(arguments, axis) for axis in mesh.axis_names}
        unused = [axis for axis, role in by_role.items() if axis != "tp" and role not in (*DATA_ROLES, "stage")]
        if unused or not names:
            named = f"the axis {unused[0]!r} would shard nothing" if unused else f"the mesh has {mesh}"
            raise UsageError(f"--planner auto looks for axes called tp, and fsdp or dp; {named}")
    axes = mesh.axis_names
    usual: dict[str, tuple[Any, str]] = {
        "megatron": (MegatronPlanner, "tp" if "tp" in axes else axes[-1]),
        "stage": (StagePlanner, "pp" if "pp" in axes else axes[0]),
        "expert": (ExpertParallelPlanner, "ep" if "ep" in axes else axes[-1]),
        "fsdp": (FullyShardPlanner, _data_axis(arguments, mesh) or axes[0]),
    }
    if unknown := [name for name in names if name not in usual]:
        ways = "megatron, expert, stage, fsdp, or auto; OptimalPlanner is called from Python"
        raise UsageError(f"no planner {unknown[0]!r}: {ways}")
    plans = [kind(mesh, axis) for kind, axis in map(usual.__getitem__, names)]
    plan = (plans[0] if len(plans) == 1 else compose(*plans)).build_plan(model)
    sharding = {axis for layout in plan.resolve(model).values() for axis in layout.sharded_axes}  # axes with an effect
    # Data axes may replicate; stages are split outside the plan.
    planned = (axis for axis, size in mesh.axes.items() if size > 1 and axis not in sharding)
    idle = [axis for axis in planned if _role(arguments, axis) not in (*DATA_ROLES, "stage")]
    if idle and arguments.planner == "auto":
        reasons = "; ".join(_grouped(list(plan.unrecognised.values()))[:3]) or "no tensor that it could shard"
        raise UsageError(f"the axis {idle[0]!r} of {mesh.axis_size(idle[0])} ranks would shard nothing: {reasons}")
    return plan, [*plan.notes, *plan.unrecognised.values()]


def _data_axis(arguments: argparse.Namespace, mesh: MeshSpec) -> str | None:
    """Return the axis that FSDP shards over: by its conventional name, or else the last one declared."""
    declared = data_axes_of(arguments) or []
    named = [axis for axis in ("fsdp", "dp_shard", "dp") if axis in mesh.axis_names and axis in (declared or [axis])]
    return (named or declared[-1:] or [None])[0]


def _role(arguments: argparse.Namespace, axis: str) -> str | None:
    declared = data_axes_of(arguments)
    return ROLE_BY_NAME.get(axis) if declared is None else "data" if axis in declared else "model"


# ---- reports --------------------------------------------------------------------------------------------------------


def _report(
    plan: ShardingPlan,
    model: nn.Module | ModelMetadata,
    arguments: argparse.Namespace,
    problems: tuple[Problem, ...],
    notes: list[Problem],
) -> int:
    """Print the plan, its costs and the verdict; status 1 if there is a problem."""
    metadata, limit = metadata_of(model), limit_of(arguments)
    memory = communication = None
    if not problems:
        memory, communication, reason = _costs_of(plan, model, arguments)
        notes = [*notes, Problem("unverified", found=reason)] if reason else notes
        if limit is not None and memory.max_bytes > limit:  # a problem like others: status 1
            state = sum(size for part, size in memory.on(memory.worst_rank).items() if part not in STEP_PARTS)
            ways = [] if arguments.checkpointing else ["--checkpointing"]
            tried = memory.moment == "loss" and plan.mesh is not None and "model" in plan.axis_roles.values()
            ways += ["--loss vocab-parallel"] if tried and arguments.loss in (None, "causal-lm") else []
            hint = f"try {', '.join([*ways, 'a smaller batch'])}, or more ranks"
            if not memory.moment or state > limit:
                largest = memory.largest(memory.worst_rank, 3)
                hint = f"use more ranks, or shard more of the largest tensors of rank {memory.worst_rank}: "
                hint += ", ".join(f"{name} ({human_bytes(size)})" for name, size in largest)
            problems = (*problems, Problem("does-not-fit", found=memory.verdict(limit), hint=hint))
        if arguments.html:
            title = "/".join(Path(arguments.model).parts[-2:])
            _write(arguments.html, html_report(plan, metadata, memory, communication, limit=limit, title=title))
    if arguments.json:
        document: dict[str, Any] = {
            "digest": plan.digest,
            "problems": [vars(problem) for problem in problems],
            "notes": [vars(note) for note in notes],
            "plan": None if memory is None else json.loads(plan.to_json()),
            "memory": None if memory is None else json.loads(memory.to_json()),
            "communication": None if communication is None else json.loads(communication.to_json()),
            "verdict": None if memory is None or limit is None else memory.verdict(limit),
        }
        print(json.dumps(document, indent=1))
        return 1 if problems else 0
    print(f"{len(metadata.tensors)} tensors, plan {plan.digest[:12]}")
    if memory is not None:
        parts: list[tuple[str, object]] = [("plan", plan.explain(None, metadata)), ("memory on each rank", memory)]
        parts += [] if communication is None else [("communication of a step", communication)]
        for title, part in parts:
            print(f"\n{title}:\n{part}")
    for title, listed in (("notes", notes), ("problems", list(problems))):
        if listed:
            print(f"\n{title}:")
            print("\n".join(f"  {line}" for line in _grouped(listed)))
    if memory is not None and limit is not None:
        print(f"\n{memory.verdict(limit)}")
    if not problems:
        print("\nno problems")
    return 1 if problems else 0


def _grouped(problems: list[Problem]) -> list[str]:
    """Merge problems that differ only in numbers and names into one line with their count."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, re.sub(r"\d+", "*", problem.found), problem.hint), []).append(problem)
    return [f"{first}{f' (and {len(more)} more like it)' if more else ''}" for first, *more in groups.values()]


def _costs_of(
    plan: ShardingPlan, model: nn.Module | ModelMetadata, arguments: argparse.Namespace
) -> tuple[Memory, Any, str]:
    """Return memory, communication (None with several meshes), and the reason if activations are not counted."""
    batch, topology, options, reason = batch_of(arguments), topology_of(arguments), step_options(arguments), ""
    if batch is not None and isinstance(model, ModelMetadata):
        reason = "names and shapes have no forward; name a config.json or MODULE:FACTORY to count activations"
    elif batch is not None:
        try:
            return *plan.cost(model, batch, optimizer=optimizer_of(arguments), topology=topology, **options), ""
        except Exception as error:  # a forward of other inputs; the report is valid without it
            if isinstance(error, PlanError) and any(problem.code != "unverified" for problem in error.problems):
                raise  # wrong options: no report without them
            line = (str(error).splitlines() or [""])[0][:200]  # torch's errors have many lines
            reason = (
                f"activations are not counted: forward on token ids {arguments.batch}: {type(error).__name__}: {line}"
            )
    memory = plan.memory(model, optimizer=optimizer_of(arguments), **options)
    try:
        return (
            memory,
            plan.communication(model, optimizer=optimizer_of(arguments), topology=topology, **options),
            reason,
        )
    except PlanError as error:
        if any(problem.code != "mesh-mismatch" for problem in error.problems):
            raise
        return memory, None, reason


def _write(path: str, text: str) -> None:
    try:
        beside = Path(f"{path}.part")  # readers see the old or the new file, also after a failed call
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
