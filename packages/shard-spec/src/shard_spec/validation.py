"""Validation: every problem of a plan for a model, in one pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.plan.metadata import ModelMetadata
from shard_spec.plan.resolve import Resolution, examine
from shard_spec.plan.values import is_spec, to_layout

if TYPE_CHECKING:
    from torch import nn

    from shard_spec.plan.content import PlanContent


def validate(
    plan: PlanContent, module: nn.Module | ModelMetadata, *, world_size: int | None = None
) -> tuple[Problem, ...]:
    """Return every problem of ``plan`` for ``module``; see ``ShardingPlan.validate``."""
    resolution = examine(plan, module)
    problems = plan_problems(plan, resolution)
    if world_size is not None and resolution.ranks and resolution.ranks[-1] >= world_size:
        text = f"the plan names ranks up to {resolution.ranks[-1]}, there are {world_size} ranks"
        problems.append(Problem("mesh-too-large", found=text, hint="start more processes or use a smaller mesh"))
    return tuple(dict.fromkeys(problems))  # once each, in order


def plan_problems(plan: PlanContent, resolution: Resolution) -> list[Problem]:
    """Return the problems of a plan that is resolved already."""
    outputs = [*_output_problems(plan, resolution.metadata), *_local_problems(plan, resolution.metadata)]
    return [*resolution.problems, *outputs]


def _module_not_found(argument: str, path: object) -> Problem:
    name = path if isinstance(path, str) else repr(path)
    hint = "name a module's FQN; '' is the root"
    return Problem("unknown-name", name, found=f"{argument} names no module of the model", hint=hint)


def _output_problems(plan: PlanContent, metadata: ModelMetadata) -> list[Problem]:
    problems = []
    for path, value in (plan.output_plan or {}).items():
        if metadata.modules and path not in metadata.modules:
            problems.append(_module_not_found("output_plan", path))
        if is_spec(value):
            continue  # its layout depends on the output's shape
        try:
            layout = to_layout(value, plan.mesh)
            if plan.mesh is not None and layout.mesh != plan.mesh:
                reason = f"its layout is on {layout.mesh!r}, the plan on {plan.mesh!r}"
                problems.append(Problem("mesh-mismatch", f"output_plan[{path!r}]", found=reason, hint="use one mesh"))
        except PlanError as error:
            problems += [replace(problem, name=f"output_plan[{path!r}]") for problem in error.problems]
    return problems


def _local_problems(plan: PlanContent, metadata: ModelMetadata) -> list[Problem]:
    names = plan.return_local_tensor or ()
    problems = []
    if metadata.modules:
        problems += [_module_not_found("return_local_tensor", name) for name in names if name not in metadata.modules]
    for name, count in Counter(names).items():
        if count > 1:
            reason = f"return_local_tensor names it {count} times"
            problems.append(Problem("duplicate-name", name, found=reason, hint="name it once"))
    return problems
