"""The four commands: each loads its inputs, evaluates a plan, and prints."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.cli.sources import UsageError, load_model, read_text
from shard_spec.estimate.cost import PRESETS, topology_preset
from shard_spec.estimate.memory import STEP_PARTS, Memory
from shard_spec.estimate.roles import DATA_AXIS_NAMES, PIPELINE_AXIS_NAMES
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.metadata import ModelMetadata, metadata_of
from shard_spec.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from torch import nn

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def run_plan(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec plan``: print the plan, its costs and problems (there should be none)."""
    if not arguments.mesh:
        raise UsageError("pass --mesh, for example --mesh dp=4,tp=2")
    model = load_model(arguments.model)
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
    model = load_model(arguments.model)
    return _report(plan, model, arguments, plan.validate(metadata_of(model)), [])


def run_explain(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec explain``: print a plan in words."""
    plan = load_plan(arguments.plan)
    metadata = metadata_of(load_model(arguments.model)) if arguments.model else None  # rules alone have an explanation
    text = plan.explain(arguments.name, metadata)
    print(json.dumps({"explanation": text, "digest": plan.digest}) if arguments.json else text)
    return 0


def run_diff(arguments: argparse.Namespace) -> int:
    """Run ``shard-spec diff``: print the changes; status 1 if there are any."""
    before, after = load_plan(arguments.before), load_plan(arguments.after)
    metadata = metadata_of(load_model(arguments.model)) if arguments.model else None
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
        names = [*(["megatron"] if "tp" in mesh.axis_names else []), *(["fsdp"] if _data_axis(mesh) else [])]
        unused = [axis for axis in mesh.axis_names if axis not in ("tp", *DATA_AXIS_NAMES, *PIPELINE_AXIS_NAMES)]
        if unused or not names:
            named = f"the axis {unused[0]!r} would shard nothing" if unused else f"the mesh has {mesh}"
            raise UsageError(f"--planner auto looks for axes called tp, and fsdp or dp; {named}")
    plans: list[Any] = []
    for name in names:
        if name == "megatron":
            plans.append(planners.MegatronPlanner(mesh, "tp" if "tp" in mesh.axis_names else mesh.axis_names[-1]))
        elif name == "fsdp":
            plans.append(planners.FullyShardPlanner(mesh, _data_axis(mesh) or mesh.axis_names[0]))
        else:
            raise UsageError(f"no planner {name!r}: megatron, fsdp, or auto; OptimalPlanner is called from Python")
    planner = plans[0] if len(plans) == 1 else planners.compose(*plans)
    plan = planner.build_plan(model)
    sharding = {axis for layout in plan.resolve(model).values() for axis in layout.sharded_axes}  # axes with an effect
    idle = [axis for axis, size in mesh.axes.items() if size > 1 and axis not in (*sharding, *DATA_AXIS_NAMES)]
    if idle and arguments.planner == "auto" and idle[0] not in PIPELINE_AXIS_NAMES:  # stages are split outside the plan
        reasons = "; ".join(_grouped(list(plan.unrecognised.values()))[:3]) or "no tensor that it could shard"
        raise UsageError(f"the axis {idle[0]!r} of {mesh.axis_size(idle[0])} ranks would shard nothing: {reasons}")
    return plan, [*plan.notes, *plan.unrecognised.values()]


def _data_axis(mesh: MeshSpec) -> str | None:
    return next((axis for axis in ("fsdp", "dp_shard", "dp") if axis in mesh.axis_names), None)


def _limit(arguments: argparse.Namespace) -> int | None:
    if not arguments.memory_limit:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", arguments.memory_limit)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--memory-limit {arguments.memory_limit!r}: write for example 80GiB or 85899345920")
    return int(float(match[1]) * _UNITS[match[2].lower()])


# ---- reports --------------------------------------------------------------------------------------------------------


def _report(
    plan: ShardingPlan,
    model: nn.Module | ModelMetadata,
    arguments: argparse.Namespace,
    problems: tuple[Problem, ...],
    notes: list[Problem],
) -> int:
    """Print the plan, its costs and the verdict; status 1 if there is a problem."""
    metadata, limit = metadata_of(model), _limit(arguments)
    memory = communication = None
    if not problems:
        memory, communication, reason = _costs_of(plan, model, arguments)
        notes = [*notes, Problem("unverified", found=reason)] if reason else notes
        if limit is not None and memory.max_bytes > limit:  # a problem like others: status 1
            state = sum(size for part, size in memory.on(memory.worst_rank).items() if part not in STEP_PARTS)
            hint = "try --checkpointing, --loss vocab-parallel, a smaller batch, or more ranks"
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
    batch, topology, reason = None, None, ""
    if arguments.batch:
        match = re.fullmatch(r"(\d+)x(\d+)", arguments.batch)
        if match is None:
            raise UsageError(f"--batch {arguments.batch!r}: write sequences x length, for example 512x8192")
        batch = int(match[1]), int(match[2])
    if arguments.topology:
        if arguments.topology not in PRESETS:
            raise UsageError(f"--topology {arguments.topology!r}: one of {', '.join(sorted(PRESETS))}")
        topology = topology_preset(arguments.topology)
    options: dict[str, Any] = {"dtype": arguments.dtype, "checkpointing": arguments.checkpointing}
    options["loss"] = None if arguments.loss == "none" else arguments.loss
    memory = plan.memory(model, optimizer=arguments.optimizer, **options)
    if batch is not None and isinstance(model, ModelMetadata):
        reason = "names and shapes have no forward; name a config.json or MODULE:FACTORY to count activations"
    elif batch is not None:
        try:
            memory = plan.memory(model, batch, optimizer=arguments.optimizer, **options)
        except Exception as error:  # a forward of other inputs; the report is valid without it
            line = (str(error).splitlines() or [""])[0][:200]  # torch's errors have many lines
            reason = f"activations are not counted: forward on token ids {arguments.batch}: "
            reason += f"{type(error).__name__}: {line}"
    try:
        counted = None if reason else batch
        communication = plan.communication(model, counted, topology=topology, **options)
    except PlanError as error:
        if any(problem.code != "mesh-mismatch" for problem in error.problems):
            raise
        communication = None
    return memory, communication, reason


def _write(path: str, text: str) -> None:
    try:
        beside = Path(f"{path}.part")  # readers see the old or the new file, also after a failed call
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
