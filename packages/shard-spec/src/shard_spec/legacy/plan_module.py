"""Plan of `shard_module` for one module, decided without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.execution_plan import ExecutionPlan
from shard_spec.apply.tensors import TensorAction, read_tensors
from shard_spec.distributed.shard_tensor import rank_problems, source_problems
from shard_spec.layout.layout import Layout, in_mesh_order
from shard_spec.layout.mesh import MeshSpec
from shard_spec.legacy.devices import device_of
from shard_spec.legacy.forwards.base import ShardedForward
from shard_spec.legacy.rank_checks import layout_problems, order_problems, ranks_of
from shard_spec.legacy.supported_modules import forward_for, unsupported_forward
from shard_spec.plan.content import PlanContent
from shard_spec.plan.resolve import Resolution, examine
from shard_spec.plan.values import is_spec, to_layout
from shard_spec.specs import ShardingSpec, as_sharder, as_spec
from shard_spec.validation import validate


def plan_module(
    module: nn.Module, plan: Any, group: dist.ProcessGroup, src_rank: int, *, whole: bool = True
) -> ExecutionPlan:
    """Decide what to do to ``module``; changes and sends nothing.

    Args:
        module: The module.
        plan: Ours, or torch's.
        group: The ranks; only asked who they are.
        src_rank: Rank in the group that has the values.
        whole: Whether tensors that the plan does not mention are broadcast too.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    plan = own_plan(plan, ranks)
    found, problems = _resolve(plan, module)
    problems += source_problems(src_rank, len(ranks))
    tensors, more = read_tensors(module, found, dist.get_rank(group), src_rank, whole)
    problems += more
    for action in tensors:
        if action.layout is not None:
            problems += layout_problems(action, ranks)
            problems += _reader_problems(module, action)
    outputs, more = _outputs(plan, ranks)
    problems += more
    problems += order_problems(tensors, outputs)
    problems += _sharder_problems(found, outputs, plan.return_local_tensor or ())
    device, more = device_of(module, plan, found, group)
    problems += more
    forwards = _forwards(module, tensors)
    return ExecutionPlan(
        tensors=tensors,
        forwards=forwards,
        options={path: _options(module.get_submodule(path)) for path in forwards},
        sharders={path: as_sharder(sharder) for path, sharder in sorted(found.sharders.items())},
        outputs=outputs,
        locals=tuple(plan.return_local_tensor or ()),
        replicas=tuple(action.names[0] for action in tensors if action.layout is None and action.kind == "parameter"),
        everything=whole,
        src_rank=src_rank,
        device=device,
        problems=tuple(dict.fromkeys(problems)),
    )


def own_plan(plan: Any, ranks: tuple[int, ...]) -> PlanContent:
    """The plan as one of ours; where neither it nor its rules name ranks, on the ranks of the group."""
    if _torch_compat.shard_kind(plan) == "plan":
        plan = PlanContent(plan.plan, plan.output_plan, plan.return_local_tensor)
    if not isinstance(plan, PlanContent):
        found = f"{plan!r:.200} of type {type(plan).__qualname__}"
        raise PlanError(Problem("wrong-type", "plan", found=found, hint="give a ShardingPlan"))
    own = [value.mesh for value in (plan.output_plan or {}).values() if isinstance(value, Layout)]
    if plan.mesh is None and all(rule.kind in ("spec", "sharder") for rule in plan.rules):
        return plan.on_mesh(own[0] if own else MeshSpec({"rank": len(ranks)}, ranks))
    return plan


def _resolve(plan: PlanContent, module: object) -> tuple[Resolution, list[Problem]]:
    if not isinstance(module, nn.Module):
        found = f"{type(module).__qualname__}"
        raise PlanError(Problem("wrong-type", "module", found=found, hint="give an nn.Module"))
    return examine(plan, module), list(validate(plan, module))


def _reader_problems(module: nn.Module, action: TensorAction) -> list[Problem]:
    problems = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        problem = unsupported_forward(module, path, name, fqn)
        if problem is not None:
            problems.append(problem)
    return problems


def _outputs(plan: PlanContent, ranks: tuple[int, ...]) -> tuple[dict[str, ShardingSpec | Layout], list[Problem]]:
    outputs: dict[str, ShardingSpec | Layout] = {}
    problems: list[Problem] = []
    for path, value in (plan.output_plan or {}).items():
        try:
            wanted = as_spec(value) if is_spec(value) else to_layout(value, plan.mesh)
        except PlanError:
            continue  # validate lists it
        assert wanted is not None
        name = f"output_plan[{path!r}]"
        try:
            named = ranks_of(wanted)
        except PlanError as error:
            problems += [replace(problem, name=name) for problem in error.problems]
            continue
        outputs[path] = in_mesh_order(wanted) if isinstance(wanted, Layout) else wanted
        if named is not None:
            problems += rank_problems(name, named, ranks)
    return outputs, problems


def _sharder_problems(found: Resolution, outputs: Mapping[str, object], local: tuple[str, ...]) -> list[Problem]:
    problems = []
    for argument, paths in (("output_plan", tuple(outputs)), ("return_local_tensor", local)):
        for path in paths:
            if any(path.startswith(sharder + ".") for sharder in found.sharders):
                text = f"{argument} names a module inside of one that a Sharder replaces"
                problems.append(Problem("sharder-nesting", path, found=text, hint="name the Sharder's module"))
    return problems


def _forwards(module: nn.Module, tensors: tuple[TensorAction, ...]) -> dict[str, Layout | None]:
    """The modules that get a sharded forward, each under one of its FQNs."""
    forwards: dict[str, Layout | None] = {}
    path_of: dict[nn.Module, str] = {}
    for action in tensors:
        if action.layout is None:
            continue
        for fqn in action.names:
            path, _, name = fqn.rpartition(".")
            owner = module.get_submodule(path)
            forward = forward_for(owner)
            if forward is None or name not in forward.tensors:
                continue
            path = path_of.setdefault(owner, path)
            if name == "weight":
                forwards[path] = action.layout
            else:
                forwards.setdefault(path, _earlier_layout(owner))
    return forwards


def _options(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _earlier_layout(module: nn.Module) -> Layout | None:
    """Return the layout of the weight after an earlier call."""
    forward = module.__dict__.get("forward")
    return forward.sharding.layout if isinstance(forward, ShardedForward) and forward.sharding is not None else None
