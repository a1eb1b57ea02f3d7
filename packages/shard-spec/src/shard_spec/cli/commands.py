"""The five commands. Each loads what it was given, asks a plan, and prints."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.cli.sources import UsageError, load_model, read_text, skeleton
from shard_spec.estimate.activations import ActivationEstimate
from shard_spec.estimate.cost import PRESETS, topology_preset
from shard_spec.estimate.memory import Memory
from shard_spec.layout.mesh import MeshSpec
from shard_spec.optimal import OptimalPlanner, Workload
from shard_spec.plan.metadata import ModelMetadata, metadata_of
from shard_spec.plan.untrusted_input import MAX_BYTES, json_values
from shard_spec.report.terminal import progress, show
from shard_spec.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from torch import nn

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def run_plan(arguments: argparse.Namespace) -> int:
    """``shard-spec plan``: plan, costs, and problems of the plan (there should be none)."""
    with progress("building the model on meta"):
        model = load_model(arguments.model)
    mesh = _mesh(arguments)
    with progress("planning"):
        made, notes = _planned(arguments, mesh, model)
        metadata = metadata_of(model)
        plan = made.compact(metadata)
    if arguments.out:
        text = plan.to_yaml() if arguments.out.endswith((".yaml", ".yml")) else plan.to_json()
        _write(arguments.out, text)
    return _report(plan, model, arguments, _problems(plan, metadata, arguments), notes)


def run_check(arguments: argparse.Namespace) -> int:
    """``shard-spec check``: every problem, or what the plan costs."""
    plan = load_plan(arguments.plan)
    with progress("building the model on meta"):
        model = load_model(arguments.model)
    return _report(plan, model, arguments, _problems(plan, metadata_of(model), arguments), [])


def run_explain(arguments: argparse.Namespace) -> int:
    """``shard-spec explain``: words."""
    plan = load_plan(arguments.plan)
    metadata = metadata_of(load_model(arguments.model)) if arguments.model else None
    if arguments.html:
        if metadata is None:
            raise UsageError("--html needs --model")
        _write_html(plan, metadata, arguments, *_costs_of(plan, metadata, arguments))
    text = plan.explain(arguments.name, metadata)
    print(json.dumps({"explanation": text, "digest": plan.digest}) if arguments.json else text)
    return 0


def run_diff(arguments: argparse.Namespace) -> int:
    """``shard-spec diff``: what changes; status 1 when something does."""
    before, after = load_plan(arguments.before), load_plan(arguments.after)
    metadata = metadata_of(load_model(arguments.model)) if arguments.model else None
    found = before.diff(after, metadata)
    print(found.to_json() if arguments.json else found)
    return 1 if found else 0


def run_convert(arguments: argparse.Namespace) -> int:
    """``shard-spec convert``: the plan in other terms."""
    metadata = metadata_of(load_model(arguments.model)) if arguments.model else None
    if metadata is None and (arguments.source == "hf" or arguments.to in ("parallelize", "hf", "layouts", "compact")):
        raise UsageError(f"--to {arguments.to} needs --model")
    if arguments.source == "hf":
        assert metadata is not None
        if not arguments.mesh:
            raise UsageError("--from hf needs --mesh")
        styles = _read(arguments.plan)
        try:
            tp_plan = json_values(styles)
        except ValueError as error:
            raise UsageError(f"{arguments.plan} is no JSON: {error}") from None
        axis = arguments.axis or "tp"
        plan = ShardingPlan.from_hf_tp_plan(tp_plan, metadata, arguments.mesh, axis, prefix=arguments.prefix)
    else:
        plan = load_plan(arguments.plan)
    print(_converted(plan, metadata, arguments.to, arguments.axis), end="")
    return 0


def _converted(plan: ShardingPlan, metadata: ModelMetadata | None, target: str, axis: str | None) -> str:
    if target == "json":
        return plan.to_json()
    if target == "yaml":
        return plan.to_yaml()
    if target == "dtensor":
        found: Any = {name: list(map(str, said)) for name, said in plan.to_dtensor_placements(metadata).items()}
        return json.dumps(found, indent=1) + "\n"
    assert metadata is not None
    if target == "compact":
        return plan.compact(metadata).to_json()
    if target == "layouts":
        return ShardingPlan.from_layouts(plan.resolve(metadata)).to_json()
    if target == "hf":
        return json.dumps(plan.to_hf_tp_plan(metadata, axis), indent=1) + "\n"
    styles = plan.to_parallelize_plan(metadata, axis)
    return json.dumps({name: _style_text(style) for name, style in styles.items()}, indent=1) + "\n"


def _style_text(style: Any) -> str:
    """A style as code: torch's have no repr that tells two apart."""
    inputs, outputs = style.input_layouts[0], style.output_layouts[0]
    return f"{type(style).__name__}(input_layouts={inputs}, output_layouts={outputs})"


# ---- what the arguments mean ----------------------------------------------------------------------------------------


def load_plan(path: str) -> ShardingPlan:
    """The plan in a JSON or YAML file."""
    text = _read(path)
    if path.endswith((".yaml", ".yml")):
        try:
            return ShardingPlan.from_yaml(text)
        except ModuleNotFoundError as error:
            raise UsageError(str(error)) from None
    return ShardingPlan.from_json(text)


def _read(path: str) -> str:
    """The text of a file, or of stdin for ``-``; not more of it than a plan may have."""
    if path == "-":
        try:
            return sys.stdin.read(MAX_BYTES + 1)
        except ValueError as error:
            raise UsageError(f"cannot read what comes in: {error}") from None
    return read_text(Path(path))


def _mesh(arguments: argparse.Namespace) -> MeshSpec:
    if not (arguments.mesh or arguments.world_size):
        raise UsageError("pass --mesh, for example --mesh dp=4,tp=2, or --world-size")
    try:
        mesh = MeshSpec.parse(arguments.mesh) if arguments.mesh else MeshSpec({"dp": arguments.world_size})
    except PlanError as error:
        raise UsageError(str(error)) from None
    if arguments.world_size and arguments.world_size != mesh.world_size:
        raise UsageError(f"--mesh {arguments.mesh} has {mesh.world_size} ranks, --world-size is {arguments.world_size}")
    return mesh


def _planned(
    arguments: argparse.Namespace, mesh: MeshSpec, model: nn.Module | ModelMetadata
) -> tuple[ShardingPlan, list[Problem]]:
    from shard_spec import planners

    module = skeleton(model) if isinstance(model, ModelMetadata) else model
    names = arguments.planner.split("+")
    if names == ["auto"]:
        names = [n for n, axis in (("megatron", "tp"), ("fsdp", "dp")) if axis in mesh.axis_names]
        if not names:
            raise UsageError(f"--planner auto looks for axes called tp and dp; the mesh has {mesh}")
    made: list[Any] = []
    for name in names:
        if name == "megatron":
            made.append(planners.MegatronPlanner(mesh, "tp" if "tp" in mesh.axis_names else mesh.axis_names[-1]))
        elif name == "fsdp":
            made.append(planners.FullyShardPlanner(mesh, "dp" if "dp" in mesh.axis_names else mesh.axis_names[0]))
        elif name == "optimal":
            made.append(_optimal(arguments, mesh))
        else:
            raise UsageError(f"no planner {name!r}: megatron, fsdp, optimal, or auto")
    planner = made[0] if len(made) == 1 else planners.compose(*made)
    plan = planner.build_plan(module)
    return plan, [*plan.notes, *plan.unrecognised.values()]


def _optimal(arguments: argparse.Namespace, mesh: MeshSpec) -> Any:
    if not arguments.batch:
        raise UsageError("--planner optimal needs --batch, for example --batch 512x8192")
    sequences, length = _batch(arguments) or (1, 1)
    workload = Workload(batch=sequences, sequence=length)
    return OptimalPlanner(topology=_topology(arguments), memory_limit=_limit(arguments), mesh=mesh, workload=workload)


def _batch(arguments: argparse.Namespace) -> tuple[int, int] | None:
    if not arguments.batch:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", arguments.batch)
    if match is None:
        raise UsageError(f"--batch {arguments.batch!r}: write sequences x length, for example 512x8192")
    return int(match[1]), int(match[2])


def _topology(arguments: argparse.Namespace) -> Any:
    if not arguments.topology:
        return None
    if arguments.topology not in PRESETS:
        raise UsageError(f"--topology {arguments.topology!r}: one of {', '.join(sorted(PRESETS))}")
    return topology_preset(arguments.topology)


def _limit(arguments: argparse.Namespace) -> int | None:
    if not arguments.memory_limit:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", arguments.memory_limit)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--memory-limit {arguments.memory_limit!r}: write for example 80GiB or 85899345920")
    return int(float(match[1]) * _UNITS[match[2].lower()])


# ---- what is printed ------------------------------------------------------------------------------------------------


def _problems(plan: ShardingPlan, metadata: ModelMetadata, arguments: argparse.Namespace) -> tuple[Problem, ...]:
    with progress("checking"):
        return plan.validate(
            metadata, world_size=arguments.world_size, memory_limit=_limit(arguments), optimizer=arguments.optimizer
        )


def _report(
    plan: ShardingPlan,
    model: nn.Module | ModelMetadata,
    arguments: argparse.Namespace,
    problems: tuple[Problem, ...],
    notes: list[Problem],
) -> int:
    metadata = metadata_of(model)
    blocking = [problem for problem in problems if problem.code not in ("does-not-fit", "mesh-too-large")]
    document: dict[str, Any] = {
        "digest": plan.digest,
        "problems": [vars(problem) for problem in problems],
        "notes": [vars(note) for note in notes],
    }
    if not blocking:
        with progress("memory and communication"):
            memory, communication = _costs_of(plan, metadata, arguments)
        with progress("activations"):
            activations, reason = _activations_of(plan, model, arguments)
        notes = [*notes, Problem("unverified", found=reason)] if reason else notes
        if activations is not None and not problems:
            problems = _activation_problems(memory, activations, arguments)
        document["activations"] = None if activations is None else vars(activations)
        document["problems"], document["notes"] = [vars(p) for p in problems], [vars(n) for n in notes]
        if arguments.html:
            with progress("drawing the page"):
                _write_html(plan, metadata, arguments, memory, communication, activations)
            print(f"wrote {arguments.html}", file=sys.stderr)
        document["memory"] = json.loads(memory.to_json())
        document["communication"] = None if communication is None else json.loads(communication.to_json())
    if arguments.json:
        document["plan"] = None if blocking else json.loads(plan.to_json())
        print(json.dumps(document, indent=1))
    else:
        print(f"{len(metadata.tensors)} tensors, plan {plan.digest[:12]}")
        if not blocking:
            show(plan, metadata, memory, communication)
            if activations is not None:
                print(f"\nactivations of a step:\n{activations}")
        if not problems:
            print("\nno problems")
        for title, found in (("notes", notes), ("problems", problems)):
            if found:
                print(f"\n{title}:")
                print("\n".join(f"  {problem}" for problem in found))
    return 1 if problems else 0


def _costs_of(plan: ShardingPlan, metadata: ModelMetadata, arguments: argparse.Namespace) -> tuple[Any, Any]:
    memory = plan.memory(metadata, optimizer=arguments.optimizer, dtype=arguments.dtype)
    axes = arguments.data_axes.split(",") if arguments.data_axes else None
    try:
        communication = plan.communication(
            metadata, _batch(arguments), topology=_topology(arguments), data_axes=axes, dtype=arguments.dtype
        )
    except PlanError as error:
        if any(problem.code != "mesh-mismatch" for problem in error.problems):
            raise
        communication = None
    return memory, communication


def _activations_of(
    plan: ShardingPlan, model: nn.Module | ModelMetadata, arguments: argparse.Namespace
) -> tuple[ActivationEstimate | None, str]:
    """Return the estimate for one rank's part of ``--batch``; or none, and the reason."""
    batch = _batch(arguments)
    if batch is None:
        return None, ""
    if isinstance(model, ModelMetadata):
        return None, "names and shapes have no forward; name a config.json or MODULE:FACTORY to count activations"
    axes = arguments.data_axes.split(",") if arguments.data_axes else None
    try:
        return plan.activations(model, batch, data_axes=axes, dtype=arguments.dtype), ""
    except Exception as error:  # a forward that takes something else; the rest of the report stands without it
        reason = (str(error).splitlines() or [""])[0][:200]
        return None, f"forward on token ids {arguments.batch} raised {type(error).__name__}: {reason}"


def _activation_problems(
    memory: Memory, activations: ActivationEstimate, arguments: argparse.Namespace
) -> tuple[Problem, ...]:
    limit = _limit(arguments)
    size = activations.checkpointed_bytes if arguments.checkpointing else activations.local_bytes
    if limit is None or memory.max_bytes + size <= limit:
        return ()
    found = (
        f"rank {memory.worst_rank} needs {human_bytes(memory.max_bytes)} for parameters, gradients and optimizer state "
        f"and about {human_bytes(size)} for activations, the limit is {human_bytes(limit)}"
    )
    fits = memory.max_bytes + activations.checkpointed_bytes <= limit
    hint = "use more ranks or a smaller batch"
    if not arguments.checkpointing and activations.num_blocks:
        small = human_bytes(activations.checkpointed_bytes)
        hint = f"with each block checkpointed about {small} remain, which {'fits' if fits else 'does not fit either'}"
    return (Problem("does-not-fit", found=found, hint=hint),)


def _write_html(
    plan: ShardingPlan,
    metadata: ModelMetadata,
    arguments: argparse.Namespace,
    memory: Memory,
    communication: Any,
    activations: ActivationEstimate | None = None,
) -> None:
    from shard_spec.report.html import html_report

    title = "/".join(Path(getattr(arguments, "model", None) or "plan").parts[-2:])
    page = html_report(plan, metadata, memory, communication, activations, title=title)
    _write(arguments.html, page)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
