"""The commands: each loads its inputs, evaluates a plan, and prints."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.cli.search import run_search as run_search
from shard_spec.cli.sources import (
    batch_of,
    data_axes_of,
    limit_of,
    load,
    load_model,
    optimizer_of,
    read_text,
    step_options,
    topology_of,
)
from shard_spec.cli.usage import UsageError
from shard_spec.estimate.memory import STEP_PARTS, Memory
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.axis_roles import DATA_ROLES, ROLE_BY_NAME
from shard_spec.plan.metadata import ModelMetadata, metadata_of
from shard_spec.report.explain import near_names
from shard_spec.sharding_plan import ShardingPlan


def run_plan(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec plan``: print the plan, its costs and problems (there should be none)."""
    if not arguments.mesh:
        raise UsageError("pass --mesh, for example --mesh dp=4,tp=2")
    model = load(arguments)
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
    plan = load_plan(arguments.plan)
    model = load(arguments)
    return _report(plan, model, arguments, plan.validate(metadata_of(model)), [])


def run_explain(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec explain``: print a plan in words."""
    plan = load_plan(arguments.plan)
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
    before, after = load_plan(arguments.before), load_plan(arguments.after)
    metadata = metadata_of(load_model(arguments.model, dequantize=True)) if arguments.model else None
    difference = before.diff(after, metadata)
    print(difference.to_json() if arguments.json else difference)
    return 1 if difference else 0  # as in diff(1)


# ---- arguments ------------------------------------------------------------------------------------------------------


def load_plan(path: str) -> ShardingPlan:
    """Load the plan of a JSON file."""
    return ShardingPlan.from_json(read_text(Path(path)))


def _planned(
    arguments: argparse.Namespace, mesh: MeshSpec, model: nn.Module | ModelMetadata
) -> tuple[ShardingPlan, list[Problem]]:
    from shard_spec import planners

    if isinstance(model, ModelMetadata):
        hint = "name a config.json or MODULE:FACTORY, or write the rules and check them: shard-spec check FILE PLAN"
        raise UsageError(f"a planner reads modules, a safetensors file has tensors alone: {hint}")
    names = arguments.planner.split("+")  # composed in this order
    if names == ["auto"]:
        by_axis = ("stage", "pp"), ("megatron", "tp"), ("expert", "ep")
        names = [name for name, axis in by_axis if axis in mesh.axis_names]
        names += ["fsdp"] if _data_axis(arguments, mesh) else []
        by_role = {axis: _role(arguments, axis) for axis in mesh.axis_names}
        unused = [axis for axis, role in by_role.items() if axis != "tp" and role not in (*DATA_ROLES, "stage")]
        if unused or not names:
            named = f"the axis {unused[0]!r} would shard nothing" if unused else f"the mesh has {mesh}"
            raise UsageError(f"--planner auto looks for axes called tp, and fsdp or dp; {named}")
    plans: list[Any] = []
    for name in names:
        if name == "megatron":
            plans.append(planners.MegatronPlanner(mesh, "tp" if "tp" in mesh.axis_names else mesh.axis_names[-1]))
        elif name == "stage":
            plans.append(planners.StagePlanner(mesh, "pp" if "pp" in mesh.axis_names else mesh.axis_names[0]))
        elif name == "expert":
            plans.append(planners.ExpertParallelPlanner(mesh, "ep" if "ep" in mesh.axis_names else mesh.axis_names[-1]))
        elif name == "fsdp":
            plans.append(planners.FullyShardPlanner(mesh, _data_axis(arguments, mesh) or mesh.axis_names[0]))
        else:
            raise UsageError(
                f"no planner {name!r}: megatron, expert, stage, fsdp, or auto; OptimalPlanner is called from Python"
            )
    plan = (plans[0] if len(plans) == 1 else planners.compose(*plans)).build_plan(model)
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
            from shard_spec.report.html import html_report

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
            reason = f"activations are not counted: forward on token ids {arguments.batch}: "
            reason += f"{type(error).__name__}: {line}"
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
