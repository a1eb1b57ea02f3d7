"""Plan of `shard_module` for one module, decided without communication.

Modules that run with a sharded tensor are decided by their class; ranks and devices by what the specs name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.apply.tensors import (
    ExecutionPlan,
    TensorAction,
    action_of,
    is_sharded,
    replica_problems,
    tensor_at,
)
from shard_spec.distributed.exchange import source_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.legacy.forwards import RefusedEmbeddingBag, ShardedEmbedding, ShardedForward, ShardedLinear
from shard_spec.plan.content import PlanContent
from shard_spec.plan.resolve import Resolution, examine, plan_problems
from shard_spec.plan.values import is_spec, to_layout
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, as_spec

_FORWARDS: tuple[type[ShardedForward], ...] = (ShardedLinear, ShardedEmbedding, RefusedEmbeddingBag)
_HINT = (
    "shard_module runs nn.Linear and nn.Embedding; for other modules use tp-styles, or a Sharder, "
    "or plan.apply, which leaves the forward to you"
)


def forward_for(module: nn.Module) -> type[ShardedForward] | None:
    """Return the sharded forward that can replace the one of ``module``, or None."""
    replaced = module.__dict__.get("forward")
    if replaced is not None and not isinstance(replaced, ShardedForward):
        return None
    return next((each for each in _FORWARDS if type(module).forward is each.original), None)


def unsupported_forward(root: nn.Module, fqn: str) -> Problem | None:
    """Return why the module that has the tensor ``fqn`` cannot run with it sharded. None when it can.

    A sharded forward uses the parameters that it lists and no other tensor. Any other forward may compute with each
    tensor that it can reach, so a floating-point tensor there is refused. A table of integers or bools is taken: a
    forward that mixes it with plain tensors is refused by torch, and one that does not gets DTensor's own result.
    """
    path, _, name = fqn.rpartition(".")
    module = root.get_submodule(path)
    forward, kind, reason = forward_for(module), type(module).__name__, ""
    if forward is not None and "weight" not in module._parameters:
        reason = f"the weight of this {kind} is computed, by a parametrization or a hook"
    elif forward is not None and name in forward.tensors:
        if isinstance(root.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
            reason = "nn.MultiheadAttention reads this weight itself, not through the module that has it"
        weight = module._parameters["weight"]
        if not reason and weight is not None and weight.is_complex() and not isinstance(module, nn.EmbeddingBag):
            return Problem(
                "unsupported-tensor",
                fqn,
                found=f"a complex {kind}: DTensor's products are not right for all of them",
                hint="leave it replicated",
            )
        options = [option for option in ("sparse", "max_norm", "scale_grad_by_freq") if getattr(module, option, None)]
        if not reason and options:
            return Problem(
                "unsupported-option",
                fqn,
                found=f"{kind}({options[0]}=...): a rank has a shard of the table alone",
                hint="turn the option off",
            )
    elif forward is None and "forward" in module.__dict__:
        reason = f"the forward of this {kind} was replaced on the instance"
    elif forward is None:
        tensor = tensor_at(root, fqn)
        inexact = tensor.is_floating_point() or tensor.is_complex()
        names = path.split(".") if path else []
        around = (root.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1))
        # The module itself, then those around it: the first with a forward of its own reads the tensor.
        reader = next((each for each in around if type(each).forward is not nn.Module.forward), None)
        if reader is not None and (inexact or type(reader).__module__.startswith("torch.")):
            reason = f"the forward of {type(reader).__qualname__} may compute with this tensor itself"
    return Problem("module-not-shardable", fqn, found=reason, hint=_HINT) if reason else None


_MANY_DIMS = 64  # a chunk spec names the same ranks whatever the shape is


def output_layout(wanted: ShardingSpec | Layout) -> Layout:
    """Return a layout on the mesh of an output: it has to exist before the forward."""
    if isinstance(wanted, Layout):
        return wanted
    if isinstance(wanted, ChunkShardingSpec):
        return wanted.to_layout((1,) * _MANY_DIMS)
    if isinstance(wanted, EnumerableShardingSpec):
        ends = [shard.box.ends for shard in wanted.shards]
        return wanted.to_layout(tuple(max(column) for column in zip(*ends, strict=True)))
    raise PlanError(
        Problem(
            "wrong-type",
            found=f"a {type(wanted).__qualname__} for an output",
            hint="give a ChunkShardingSpec, an EnumerableShardingSpec or a Layout",
        )
    )


def device_of(
    module: nn.Module, plan: PlanContent, found: Resolution, group: dist.ProcessGroup
) -> tuple[torch.device, list[Problem]]:
    """Return the device of this rank, and problems of the devices that specs name.

    The specs name it; where there is none, it is the device of the module's tensors; where they are all on meta, the
    kind of device that the group communicates on.
    """
    named: dict[str, str] = {}
    mine: torch.device | None = None
    for name, key in found.rule_of.items():
        spec = as_spec(plan.plan[key]) if key and name in found.layouts else None
        for shard in () if spec is None else spec.shards_for(found.tensor(name).shape):
            assert shard.placement is not None
            device = shard.placement.device()
            named.setdefault(device.type, name)
            if shard.rank == dist.get_rank():
                mine = mine or device
    if len(named) > 1:
        return torch.device("cpu"), [
            Problem(
                "device-mismatch",
                found=", ".join(f"{kind} for {name}" for kind, name in named.items()),
                hint="name one kind of device in one call",
            )
        ]
    tensors = (*module.parameters(), *module.buffers())
    device = mine or next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if device is None:
        on_cpu = "cpu:" in str(dist.get_backend_config(group))
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return device, [
            Problem(
                "device-mismatch",
                "placements",
                found=f"{device}, but this rank sees {torch.cuda.device_count()} CUDA device(s)",
                hint="name a device that exists on the rank",
            )
        ]
    return device, []


def rank_problems(name: str, mesh: MeshSpec, ranks: tuple[int, ...]) -> list[Problem]:
    """Report ranks that are not the group's, in its order, and groups to be made."""
    named = tuple(mesh.ranks)
    outside, missing = sorted(set(named) - set(ranks)), sorted(set(ranks) - set(named))
    problems = []
    if outside:
        problems.append(
            Problem(
                "rank-outside-mesh",
                name,
                found=f"ranks {outside} are not in the group {list(ranks)}",
                hint="name global ranks of the group",
            )
        )
    if missing:
        problems.append(
            Problem(
                "rank-outside-mesh",
                name,
                found=f"ranks {missing} of the group hold nothing",
                hint="name every rank of the group once, or pass a smaller process_group",
            )
        )
    if not problems and named != ranks:
        # Torch sorts the ranks of new groups, and would gather shards in that order without an error.
        problems.append(
            Problem(
                "mesh-mismatch",
                name,
                found=f"ranks in the order {list(named)}",
                hint=f"name them in the order of the group, {list(ranks)}",
            )
        )
    if not problems and mesh.ndim > 1 and len(ranks) < dist.get_world_size():
        # Only all ranks of the job can make the groups of several axes.
        problems.append(
            Problem(
                "no-process-group",
                name,
                found=f"a mesh of {mesh.ndim} axes over {len(ranks)} of {dist.get_world_size()} ranks",
                hint="use the default group, or shard along one axis",
            )
        )
    return problems


def plan_module(
    module: nn.Module, plan: Any, group: dist.ProcessGroup, src_rank: int, *, whole: bool = True
) -> ExecutionPlan:
    """Decide what to do to ``module``; changes and sends nothing.

    With ``whole``, tensors that the plan does not mention are broadcast from ``src_rank`` of the group too.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if _torch_compat.shard_kind(plan) == "plan":
        plan = PlanContent(plan.plan, plan.output_plan, plan.return_local_tensor)
    if not isinstance(plan, PlanContent):
        raise PlanError(
            Problem(
                "wrong-type",
                "plan",
                found=f"{plan!r:.200} of type {type(plan).__qualname__}",
                hint="give a ShardingPlan",
            )
        )
    if plan.mesh is None and all(rule.kind in ("spec", "sharder") for rule in plan.rules):
        # Neither the plan nor its rules name ranks: those of an output's layout, else of the group.
        own = [value.mesh for value in (plan.output_plan or {}).values() if isinstance(value, Layout)]
        plan = plan.on_mesh(own[0] if own else MeshSpec({"rank": len(ranks)}, ranks))
    if not isinstance(module, nn.Module):
        raise PlanError(Problem("wrong-type", "module", found=type(module).__qualname__, hint="give an nn.Module"))
    resolution = examine(plan, module)
    problems = [*plan_problems(plan, resolution), *source_problems(src_rank, len(ranks))]
    tensors = []
    for metadata in resolution.metadata.tensors:
        layout = resolution.layouts.get(metadata.name)
        tensor, planned = tensor_at(module, metadata.name), bool(resolution.rule_of.get(metadata.name))
        if layout is None or (not planned and (not whole or is_sharded(tensor))):
            continue
        stays = not planned or layout.is_replicated
        is_source = dist.get_rank(group) == src_rank
        target = None if stays else layout
        action, wrong = action_of(tensor, metadata, target, replaces=planned, needs_values=is_source)
        tensors.append(action)
        problems += wrong
        if stays:
            holders = [module.get_submodule(name.rpartition(".")[0]) for name in metadata.aliases]
            problems += replica_problems(holders, metadata.name)
        if action.layout is not None:
            problems += rank_problems(action.names[0], action.layout.mesh, ranks)
            problems += filter(None, (unsupported_forward(module, fqn) for fqn in action.names))
    outputs, more = _outputs(plan, ranks)
    problems += more
    for argument, paths in (("output_plan", tuple(outputs)), ("return_local_tensor", plan.return_local_tensor or ())):
        inside = [path for path in paths if any(path.startswith(outer + ".") for outer in resolution.sharders)]
        problems += [
            Problem(
                "sharder-nesting",
                path,
                found=f"{argument} names a module inside of one that a Sharder replaces",
                hint="name the Sharder's module",
            )
            for path in inside
        ]
    device, more = device_of(module, plan, resolution, group)
    problems += more
    raise_problems(dict.fromkeys(problems))
    forwards = _forwards(module, tensors)
    owners = [(path, module.get_submodule(path)) for path in forwards]
    return ExecutionPlan(
        tensors=tuple(tensors),
        forwards=forwards,
        options={path: f"{type(each).__name__}({each.extra_repr()})" for path, each in owners},
        sharders=dict(sorted(resolution.sharders.items())),
        outputs=outputs,
        locals=tuple(plan.return_local_tensor or ()),
        everything=whole,
        src_rank=src_rank,
        device=device,
    )


def _outputs(plan: PlanContent, ranks: tuple[int, ...]) -> tuple[dict[str, ShardingSpec | Layout], list[Problem]]:
    outputs: dict[str, ShardingSpec | Layout] = {}
    problems: list[Problem] = []
    for path, value in (plan.output_plan or {}).items():
        try:
            wanted: Any = (as_spec(value) or value) if is_spec(value) else to_layout(value, plan.mesh)
        except PlanError:
            continue  # validate lists it
        name = f"output_plan[{path!r}]"
        try:
            problems += rank_problems(name, output_layout(wanted).mesh, ranks)
        except PlanError as error:
            problems += [replace(problem, name=name) for problem in error.problems]
            continue
        outputs[path] = wanted
    return outputs, problems


def _forwards(module: nn.Module, tensors: list[TensorAction]) -> dict[str, tuple[str, ...]]:
    """Return the modules that get a sharded forward, with names of what is sharded."""
    forwards: dict[str, tuple[str, ...]] = {}
    path_of: dict[nn.Module, str] = {}
    for fqn in (fqn for action in tensors if action.layout is not None for fqn in action.names):
        path, _, name = fqn.rpartition(".")
        owner = module.get_submodule(path)
        forward = forward_for(owner)
        if forward is not None and name in forward.tensors:
            path = path_of.setdefault(owner, path)
            earlier = owner.__dict__.get("forward")
            names = forwards.get(path, earlier.sharded if isinstance(earlier, ShardedForward) else ())
            forwards[path] = (*names, name)
    return forwards
