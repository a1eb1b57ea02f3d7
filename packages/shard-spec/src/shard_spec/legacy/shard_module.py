"""``shard_module`` and ``shard_parameter``: compare, scatter, then change the module, all or nothing.

The plan for one module is decided without communication. Modules that run with a sharded tensor are decided by their
class; ranks and devices by what the specs name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shard_spec import _torch_compat
from shard_spec._shared.consensus import problems_of
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.apply.apply import Call, carry_out
from shard_spec.apply.handle import (
    ExecutionPlan,
    Installed,
    ShardHandle,
    TensorAction,
    UndoLog,
    action_of,
    is_sharded,
    put,
    replica_problems,
    summed_over,
    tensor_at,
)
from shard_spec.distributed import GroupRef, MeshCache, group_or_default, on_all_ranks, source_problems
from shard_spec.layout import Layout, MeshSpec
from shard_spec.legacy.hooks import (
    BatchRows,
    CompareAndHook,
    ModuleOutput,
    RefusedEmbeddingBag,
    ShardedEmbedding,
    ShardedForward,
    ShardedLinear,
)
from shard_spec.plan.content import PlanContent, is_spec, to_layout
from shard_spec.plan.resolve import Resolution, examine, plan_problems
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, as_spec, unknown_spec

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
            reason = f"a complex {kind}: DTensor's products are not right for all of them"
            return Problem("unsupported-tensor", fqn, found=reason, hint="leave it replicated")
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
        tensor, names = tensor_at(root, fqn), path.split(".") if path else []
        inexact = tensor.is_floating_point() or tensor.is_complex()
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
    device = mine or next((t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta), None)
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
    named, world = tuple(mesh.ranks), dist.get_world_size()
    outside, missing = sorted(set(named) - set(ranks)), sorted(set(ranks) - set(named))
    same = not outside and not missing
    rules = (
        (
            outside,
            "rank-outside-mesh",
            f"ranks {outside} are not in the group {list(ranks)}",
            "name global ranks of the group",
        ),
        (
            missing,
            "rank-outside-mesh",
            f"ranks {missing} of the group hold nothing",
            "name every rank of the group once, or pass a smaller process_group",
        ),
        (  # Torch sorts the ranks of new groups, and would gather shards in that order without an error.
            same and named != ranks,
            "mesh-mismatch",
            f"ranks in the order {list(named)}",
            f"name them in the order of the group, {list(ranks)}",
        ),
        (  # Only all ranks of the job can make the groups of several axes.
            same and named == ranks and mesh.ndim > 1 and len(ranks) < world,
            "no-process-group",
            f"a mesh of {mesh.ndim} axes over {len(ranks)} of {world} ranks",
            "use the default group, or shard along one axis",
        ),
    )
    return [Problem(code, name, found=found, hint=hint) for wrong, code, found, hint in rules if wrong]


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
    is_source = dist.get_rank(group) == src_rank
    for metadata, layout in resolution.placed():
        tensor, planned = tensor_at(module, metadata.name), bool(resolution.rule_of.get(metadata.name))
        if not planned and (not whole or is_sharded(tensor)):
            continue
        stays = not planned or layout.is_replicated
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


def keep_slow_path(module: nn.Module, args: Any) -> None:
    """Do nothing, as a forward pre-hook: nn.TransformerEncoderLayer reads weights past modules without hooks."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def shard_module(
    module: nn.Module, plan: ShardingPlan | Any, src_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> ShardHandle:
    """Shard ``module`` in place as ``plan`` says, with the values that ``src_rank`` has.

    Every rank of the group calls it. Before anything moves the ranks compare what they are about to do; a problem on
    one rank raises the same error on all, and a call that fails leaves the module as it was.

    Parameters and buffers that the plan names become DTensors; tied ones stay tied, frozen ones frozen. The others get
    the source's values. From then on each rank passes torch's chunk of the batch; other sizes are refused before the
    forward runs. The module computes what the unsharded one does on all chunks, in the order of the ranks:

    - an ``nn.Linear`` with a sharded weight returns a DTensor, the outputs of the whole batch: cut in its last dim
      where the weight's rows are cut, partial sums where its columns are. The next sharded Linear takes it as it is.
    - an ``nn.Embedding`` returns this rank's rows. An ``nn.EmbeddingBag`` keeps a sharded table for a module around it
      that looks ids up itself; its own forward raises.
    - ``output_plan`` lays the output of a module out otherwise; ``return_local_tensor`` gives this rank's rows back.
    - in backward, the loss is the sum of the ranks' losses: gradients of parameters that are not sharded are summed
      over the group as well, so that all parameters train as in the unsharded module.

    Args:
        module: The module. On ranks other than ``src_rank`` its tensors may be on the meta device.
        plan: Ours or torch's ``ShardingPlan``. Ranks in specs are global ranks, every rank of the group named once,
            in one order in the whole plan. A ``Sharder`` replaces the submodule it is given for.
        src_rank: Rank in the group that has the values.
        process_group: Default: the default group.

    Returns:
        A handle with ``plan``, ``actions`` (``explain()``, ``to_json()``) and ``undo()``.

    Raises:
        PlanError: With every problem of every rank, before anything moved.
    """
    return _act(module, lambda: plan, src_rank, group_or_default(process_group), whole=True)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec | Layout | Any,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardHandle:
    """Shard one parameter or buffer of ``module`` in place.

    As ``shard_module`` with a plan of one entry, but nothing else in the module is looked at: what the other
    parameters hold on each rank, and their gradients, stay as they are, except that gradients of the replicated
    parameters of this very module are summed over the group.

    Args:
        module: The module that has the parameter itself.
        param_name: Its name there, without dots.
        sharding_spec: Ours, torch's, or a ``Layout``.
        src_rank: Rank in the group that has the values.
        process_group: Default: the default group.

    Raises:
        PlanError: Before anything moved, on every rank; ``tied-elsewhere`` when another module has the same parameter
            (shard the module that holds both).
    """
    group = group_or_default(process_group)

    def check() -> list[Problem]:
        name: Any = param_name  # callers are untyped
        if not isinstance(name, str) or "." in name:
            hint = "the name of a parameter of this very module; for deeper ones use shard_module"
            return [Problem("invalid-argument", "param_name", found=repr(param_name), hint=hint)]
        if not isinstance(sharding_spec, Layout) and as_spec(sharding_spec) is None:
            return [unknown_spec("sharding_spec", sharding_spec)]
        return []

    return _act(module, lambda: ShardingPlan({param_name: sharding_spec}), src_rank, group, whole=False, check=check)


# ---- the recipe -----------------------------------------------------------------------------------------------


def _act(
    module: nn.Module,
    plan_of_call: Callable[[], Any],
    src_rank: int,
    group: dist.ProcessGroup,
    *,
    whole: bool,
    check: Callable[[], list[Problem]] = list,
) -> ShardHandle:
    """Shard the ``whole`` module, or only what the plan names. What the functions raise on one rank, all raise."""

    def planned() -> tuple[Any, ExecutionPlan]:
        problems = check()
        try:
            plan = plan_of_call()
            actions = plan_module(module, plan, group, src_rank, whole=whole)
        except Exception as error:
            raise PlanError((*problems_of(error), *problems)) from error
        raise_problems(problems)
        return plan, actions

    plan, actions = on_all_ranks(
        group,
        "shard_module" if whole else "shard_parameter",
        planned,
        lambda plan_and_actions: plan_and_actions[1].lines,
    )
    ref = GroupRef(group)
    layouts = [action.layout for action in actions.tensors if action.layout is not None]
    meshes = MeshCache(ref, actions.device.type, [*layouts, *map(output_layout, actions.outputs.values())])
    rows = BatchRows(ref, meshes.flat)
    norms = [name for name, each in module.named_modules() if isinstance(each, _BATCH_NORMS)]
    if whole and ref.size > 1 and norms:
        warnings.warn(
            f"shard_module: each rank normalizes with the statistics of its own rows in {', '.join(norms)}, where the "
            "unsharded module uses the full batch; use nn.SyncBatchNorm, or a norm over features",
            stacklevel=3,
        )
    call = Call(module, group, meshes.mesh_of, src_rank=src_rank)

    def finish(installed: Installed, replaced: dict[str, nn.Module], log: UndoLog) -> None:
        for path, new in replaced.items() if ref.size > 1 else ():
            named = [(name, each) for name, each in new.named_parameters() if each.requires_grad]
            owned = [name for name, each in named if not is_sharded(each) and not summed_over(each)]
            if owned:
                warnings.warn(
                    f"shard_module: values and gradients of {', '.join(owned)} in {path} are each rank's own, since a "
                    "Sharder decides about them; where they are replicas, call shard_module inside of the Sharder",
                    stacklevel=5,
                )
        for path, sharded in actions.forwards.items():
            owner = module.get_submodule(path)
            kind = forward_for(owner)
            assert kind is not None
            forward = kind(owner, path, rows, sharded)
            installed.removals.append(put(owner.__dict__, "forward", forward, log))
            installed.forwards[path] = owner, forward
            installed.register(owner.register_forward_pre_hook(keep_slow_path), log)
        for path in dict.fromkeys((*actions.outputs, *actions.locals)):
            output = ModuleOutput(path, rows, meshes, actions.outputs.get(path), path in actions.locals)
            installed.register(module.get_submodule(path).register_forward_hook(output), log)
        compare = CompareAndHook(rows, everything=actions.everything, others=list(replaced.values()))
        installed.register(compare, log)
        compare.adopt(module)
        # Before the user's own hooks: they may run modules that communicate.
        installed.register(module.register_forward_pre_hook(compare, prepend=True), log)

    return carry_out(call, plan, actions, finish=finish)
