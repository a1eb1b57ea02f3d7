"""``plan.apply``: shard a module's parameters and buffers in place, without a change of its forward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_spec._shared.consensus import as_bytes, assert_consistent, mesh_order_problems, tensor_hashes
from shard_spec._shared.dtensor import as_dtensor
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.apply.handle import (
    ExecutionPlan,
    InfoOnSave,
    Installed,
    LayGradient,
    LocalParameter,
    ShardHandle,
    TensorAction,
    UndoLog,
    action_of,
    place,
    put,
    run_sharders,
    sharding_info,
    tensor_at,
    undone_on_failure,
)
from shard_spec.distributed import broadcast_, group_or_default, on_all_ranks, source_problems, take
from shard_spec.layout import ROLE_BY_NAME, Layout, MeshSpec, ReplicateSpec
from shard_spec.plan.content import PlanContent
from shard_spec.plan.resolve import examine, merged_problems, plan_problems

Source: TypeAlias = Literal["scatter", "local", "meta"]
Initializer: TypeAlias = Callable[[str, torch.Tensor], object]
SOURCES = ("scatter", "local", "meta")


def group_of(mesh: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group of all ranks of the mesh.

    Raises:
        PlanError: ``wrong-type``: raised on all ranks of ``group``, if it was passed. ``rank-outside-mesh``,
            ``no-process-group``, ``mesh-mismatch``: raised on this rank only, since its peers are unknown.
    """
    if not isinstance(mesh, DeviceMesh):
        error = PlanError(
            Problem(
                "wrong-type",
                "mesh",
                found=f"{mesh!r:.40} of type {type(mesh).__qualname__}",
                hint="give a DeviceMesh, from init_device_mesh or mesh_spec.to_device_mesh('cuda')",
            )
        )
        if group is not None:
            assert_consistent(group_or_default(group), "apply", error=error)
        raise error
    ranks = sorted(mesh.mesh.flatten().tolist())
    if mesh.get_coordinate() is None:
        raise PlanError(
            Problem(
                "rank-outside-mesh",
                "mesh",
                found=f"rank {dist.get_rank()} is not on the mesh of ranks {ranks}",
                hint="call it on ranks of the mesh only",
            )
        )
    if group is None and mesh.ndim == 1:  # groups of one axis exist already
        return mesh.get_group()
    if group is None and len(ranks) < dist.get_world_size():
        raise PlanError(
            Problem(
                "no-process-group",
                "group",
                found=f"a mesh of {mesh.ndim} axes over {len(ranks)} of {dist.get_world_size()} ranks",
                hint="pass group=, a process group of all ranks of the mesh",
            )
        )
    meeting = group_or_default(group)
    members = sorted(dist.get_process_group_ranks(meeting))
    if members != ranks:
        raise PlanError(
            Problem(
                "mesh-mismatch",
                "group",
                found=f"a group of ranks {members} for a mesh of ranks {ranks}",
                hint="pass the group of the mesh's ranks",
            )
        )
    return meeting


def argument_problems(call: Call, mesh: DeviceMesh, plan_roles: Mapping[str, str]) -> list[Problem]:
    """Report arguments that are wrong or contradict each other, and axes that a plan cannot be applied along."""
    init, source = call.init, call.source
    rules = (
        (
            "invalid-argument",
            source not in SOURCES,
            "source",
            repr(source),
            f"one of {', '.join(map(repr, SOURCES))}",
        ),
        (
            "conflicting-arguments",
            init is not None and source != "meta",
            "init",
            f"init= with source={source!r}",
            "init fills meta tensors: use source='meta', or leave it out",
        ),
        (
            "invalid-argument",
            not (init is None or callable(init)),
            "init",
            repr(init),
            "a function init(fqn, tensor), or None",
        ),
    )
    problems = [
        *mesh_order_problems(mesh),
        *(Problem(code, name, found=found, hint=hint) for code, wrong, name, found, hint in rules if wrong),
        *source_problems(call.src_rank, dist.get_world_size(call.group)),
    ]
    # A layout cannot express that a rank holds none of the layers of another stage.
    hint = "apply one stage's plan on the mesh of that stage, mesh[the other axes]"
    reason = "the stages of a pipeline hold different layers"
    names = [axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
    axes = [axis for axis in names if plan_roles.get(axis, ROLE_BY_NAME.get(axis)) == "stage"]
    problems += [Problem("plan-not-executable", "mesh", axis=axis, found=reason, hint=hint) for axis in axes]
    return problems


def on_mesh(layout: Layout, mesh: MeshSpec, name: str) -> Layout | Problem:
    """Rebind a layout to the ranks of the live mesh: plans fix axes, not ranks."""
    if layout.mesh == mesh:
        return layout
    same_axes = layout.mesh.axis_names == mesh.axis_names and layout.mesh.shape == mesh.shape
    from_spec = layout.mesh.ndim == mesh.ndim == 1 and tuple(layout.mesh.ranks) == tuple(mesh.ranks)
    if same_axes or from_spec:
        order = [mesh.axis_names[layout.mesh.axis_names.index(axis)] for axis in layout.order]
        return Layout(mesh, layout.specs, order)
    return Problem(
        "mesh-mismatch",
        name,
        found=f"a layout on the axes {layout.mesh} of ranks {list(layout.mesh.ranks)}; the mesh has {mesh}",
        hint="give the plan the axes of the mesh, in its order",
    )


def apply_plan(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: PlanContent,
    *,
    source: Source = "scatter",
    src_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    init: Initializer | None = None,
    seed: int = 0,
) -> ShardHandle:
    """Replace the parameters and buffers of ``module`` by their shards, all or nothing; see ``ShardingPlan.apply``.

    Every tensor becomes a DTensor on ``mesh``, also those without a rule (replicated), and gradients get the layout of
    their parameters. A fused weight (``InterleavedShard`` along one axis, replicated along the others) becomes a plain
    local parameter with its sections in ``_sharding_info``; its gradient is up to the caller. Other layouts raise
    before any change.

    Args:
        module: The module.
        mesh: The ranks.
        plan: Its mesh, if it has one, has the axes of ``mesh``.
        source: ``"scatter"``: rank ``src_rank`` has the values, the others' are ignored (and may be on meta).
            ``"local"``: every rank has all values; they are compared by checksum and nothing is sent.
            ``"meta"``: ``init`` creates tensors on the meta device; others are taken as with ``"local"``.
        src_rank: Rank in the group.
        group: A group of all ranks of the mesh. Needed only if a mesh of several axes does not hold all ranks.
        init: With ``source="meta"``: a function ``init(fqn, tensor)`` that fills a full tensor in place, one at a time;
            or None: shards are filled with NaN (0 for dtypes without NaN), for loading a checkpoint.
        seed: Seed of the random numbers of ``init``. They depend on it and the FQN only, so every layout, and every
            replica, gets the same values.

    Returns:
        A handle with ``plan``, ``actions`` (``explain()``, ``to_json()``) and ``undo()``.

    Raises:
        PlanError: With every problem of every rank, before any change.
    """
    meeting = group_of(mesh, group)
    call = Call(module, meeting, lambda layout: mesh, source, src_rank, init, seed)

    def planned() -> tuple[ExecutionPlan, list[torch.Tensor] | None]:
        actions = _plan(plan, call, mesh)
        # Nothing is sent for other sources, but `init` is the caller's, and may fail on one rank.
        return actions, None if source == "scatter" else stage(call, actions)

    actions, staged = on_all_ranks(meeting, "apply", planned, lambda plan_and_shards: plan_and_shards[0].lines)
    return carry_out(call, plan, actions, staged)


@dataclass(frozen=True)
class Call:
    """Arguments of one call that shards a module, and its ranks; see `apply_plan`."""

    module: nn.Module
    group: dist.ProcessGroup
    mesh_of: Callable[[Layout], DeviceMesh]
    source: Source = "scatter"
    src_rank: int = 0
    init: Initializer | None = None
    seed: int = 0


Finish: TypeAlias = Callable[[Installed, dict[str, nn.Module], UndoLog], object]


def carry_out(
    call: Call,
    plan: PlanContent,
    actions: ExecutionPlan,
    staged: list[torch.Tensor] | None = None,
    finish: Finish | None = None,
) -> ShardHandle:
    """Make the shards, run Sharders, and put all in place: everything or nothing.

    Args:
        call: The arguments of the call.
        plan: The plan, for the handle.
        actions: What all ranks have agreed on.
        staged: This rank's shards, if they are made already.
        finish: Adds forwards and hooks at the end, with the modules that Sharders replaced.
    """
    with undone_on_failure() as log:
        staged = stage(call, actions) if staged is None else staged
        replaced = run_sharders(call.module, actions, call.group, log) if actions.sharders else {}  # they may raise
        installed = install(call, actions, staged, replaced, log)
        if finish is not None:
            finish(installed, replaced, log)
    return ShardHandle(plan, actions, call.module, call.group, installed)


# ---- planning -------------------------------------------------------------------------------------------------------


def _plan(plan: PlanContent, call: Call, mesh: DeviceMesh) -> ExecutionPlan:
    """Plan the action on each tensor, without changes or communication."""
    module, source, me = call.module, call.source, dist.get_rank(call.group)
    spec = MeshSpec.from_device_mesh(mesh)
    problems = argument_problems(call, mesh, plan.axis_roles)
    if plan.mesh is None and not any(isinstance(value, Layout) for value in plan.plan.values()):
        plan = plan.on_mesh(spec)  # text rules need the axes
    resolution = examine(plan, module)
    problems += plan_problems(plan, resolution)
    if plan.output_plan or plan.return_local_tensor:
        problems.append(
            Problem(
                "conflicting-arguments",
                "output_plan",
                found="apply changes no forward, so output_plan and return_local_tensor have no effect",
                hint="use shard_module, or leave them out",
            )
        )
    tensors: list[TensorAction] = []
    compared: dict[str, torch.Tensor] = {}
    for metadata, layout in resolution.placed():
        name, tensor = metadata.name, tensor_at(module, metadata.name)
        if tensor.is_complex() and tensor.requires_grad and {-1, tensor.ndim - 1} & {*layout.sharded_axes.values()}:
            problems.append(
                Problem(
                    "unsupported-tensor",
                    name,
                    found="complex, and sharded in its last dim: torch's Adam writes to a copy",
                    hint="shard another dim",
                )
            )
        for alias in () if layout.is_replicated else metadata.aliases:
            owner = module.get_submodule(alias.rpartition(".")[0])
            if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.scale_grad_by_freq:
                # DTensor divides by the counts of a part of the ids.
                problems.append(
                    Problem(
                        "unsupported-option",
                        alias,
                        found="scale_grad_by_freq, sharded",
                        hint="turn the option off, leave the table replicated, or use shard_module",
                    )
                )
        bound = on_mesh(layout, spec, name)
        own = None if isinstance(bound, Problem) else bound
        action, wrong = action_of(
            tensor,
            metadata,
            own,
            replaces=True,
            needs_values=source == "local" or (source == "scatter" and me == call.src_rank),
            local=True,
        )
        problems += [*wrong, bound] if isinstance(bound, Problem) else wrong
        tensors.append(action)
        if source != "scatter":
            compared[name] = tensor
    raise_problems(merged_problems(tuple(dict.fromkeys(problems)), len(resolution.layouts)) if problems else ())
    real = {name: tensor for name, tensor in compared.items() if not tensor.is_meta}
    hashes = tensor_hashes(real) if real else {}
    how = getattr(call.init, "__qualname__", repr(call.init))
    texts = {"scatter": "", "meta": f"meta tensors filled by {how} with seed {call.seed}"}
    return ExecutionPlan(
        tensors=tuple(tensors),
        sharders=dict(sorted(resolution.sharders.items())),
        src_rank=call.src_rank,
        source=texts.get(source, "every rank's own values"),
        values=tuple(f"{name}: {hashes.get(name, 'meta')}" for name in compared),
        device=torch.empty(0, device=mesh.device_type).device,  # with the index of the current one
    )


# ---- moving and installing ------------------------------------------------------------------------------------------


def scattered(call: Call, tensor: torch.Tensor, action: TensorAction, device: torch.device) -> torch.Tensor:
    """Return this rank's shard, as exact bytes: from the source to each first replica, then along replicating axes.

    The source sends every element once, for any number of replicas.
    """
    layout, group, src, me = action.layout, call.group, call.src_rank, dist.get_rank(call.group)
    full = tensor.detach() if me == src else None  # other ranks' values are ignored
    if layout is None:
        value = torch.empty(action.shape, dtype=action.dtype, device=device) if full is None else full.to(device)
        return broadcast_(value.contiguous(), group, src)
    ranks = dist.get_process_group_ranks(group)
    local = torch.empty(layout.local_shape(ranks[me], action.shape), dtype=action.dtype, device=device)
    firsts = [layout.is_primary(rank) for rank in ranks]  # of their replicas
    sizes = [
        prod(layout.local_shape(rank, action.shape)) * local.element_size() if first else 0
        for rank, first in zip(ranks, firsts, strict=True)
    ]
    packed = torch.empty(0, dtype=torch.uint8, device=device)
    if full is not None:
        shards = [take(full, layout, rank).reshape(-1) for rank, first in zip(ranks, firsts, strict=True) if first]
        packed = as_bytes(torch.cat(shards).to(device))
    if sum(sizes):
        receives = [sizes[me] if rank == src else 0 for rank in range(len(ranks))]
        sends = sizes if me == src else [0] * len(ranks)
        dist.all_to_all_single(as_bytes(local)[: sum(receives)], packed, receives, sends, group=group)
    mesh = call.mesh_of(layout)
    for axis, spec in enumerate(layout.specs):  # mesh order on all ranks
        if isinstance(spec, ReplicateSpec) and mesh.size(axis) > 1:
            broadcast_(local, mesh.get_group(axis), 0)
    return local


def materialized(call: Call, action: TensorAction, device: torch.device) -> torch.Tensor:
    """Return this rank's shard of a meta tensor: of what ``init`` writes, or NaN (0 for dtypes without NaN)."""
    assert action.layout is not None
    shape = action.shape if call.init is not None else action.layout.local_shape(dist.get_rank(), action.shape)
    value = torch.empty(shape, dtype=action.dtype, device=device)  # NaN: unwritten entries show
    value.fill_(float("nan") if value.is_floating_point() or value.is_complex() else 0)
    if call.init is None:
        return value
    name = action.names[0]
    # The random numbers depend on the seed and the FQN, neither on the layout nor on the rank.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"), torch.no_grad():
        torch.manual_seed((call.seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 63))
        call.init(name, value)
    return take(value, action.layout, dist.get_rank()).clone(memory_format=torch.contiguous_format)


def stage(call: Call, actions: ExecutionPlan) -> list[torch.Tensor]:
    """Create this rank's shards (whole tensors where there is no layout), in one order on all ranks.

    Only ``source="scatter"`` communicates.
    """
    staged: list[torch.Tensor] = []
    for action in actions.tensors:
        tensor, layout = tensor_at(call.module, action.names[0]), action.layout
        if call.source == "scatter":
            local = scattered(call, tensor, action, actions.device)
        elif tensor.is_meta:
            local = materialized(call, action, actions.device)
        else:
            assert layout is not None
            shard = take(tensor, layout, dist.get_rank()).to(actions.device)
            local = shard.clone(memory_format=torch.contiguous_format)  # a copy: the full tensor can be freed
        if layout is None:
            staged.append(local)
            continue
        mesh = call.mesh_of(layout)
        expression = action.format
        assert expression is not None  # planned
        placements, is_parameter = expression.placements, action.kind == "parameter"
        if expression.kind == "local":
            local = LocalParameter(local, action.requires_grad) if is_parameter else local
            local._sharding_info = sharding_info(mesh, expression, action.shape)  # type: ignore[attr-defined]  # our convention for local tensors
        else:
            local = as_dtensor(local, mesh, placements, action.shape)
            local = nn.Parameter(local, requires_grad=action.requires_grad) if is_parameter else local
            if local.requires_grad:
                local.register_hook(LayGradient(placements))  # type: ignore[no-untyped-call]  # DTensor's
        staged.append(local)
    return staged


def install(
    call: Call,
    actions: ExecutionPlan,
    staged: list[torch.Tensor],
    replaced: dict[str, nn.Module],
    log: UndoLog,
) -> Installed:
    """Put everything in its place; local, and logged."""
    module, installed = call.module, Installed()
    for action, value in zip(actions.tensors, staged, strict=True):
        old = tensor_at(module, action.names[0])
        if action.layout is not None:
            installed.placed.append(place(module, action, old, value, log))
        elif old.is_meta:  # undo leaves it
            new = nn.Parameter(value, requires_grad=action.requires_grad) if action.kind == "parameter" else value
            place(module, action, old, new, log)
        elif not torch.equal(old.detach(), value.to(old.device)):  # equal values need no copy
            log.append(partial(old.detach().copy_, old.detach().clone()))
            old.detach().copy_(value)  # the same memory, outside of autograd
    for path, new_module in replaced.items():
        inside = module.get_submodule(path)
        for parent in list(module.modules()):
            for name in [name for name, child in parent._modules.items() if child is inside]:
                put(parent._modules, name, new_module, log)
        installed.final.append(
            Problem(
                "sharder-nesting",
                path,
                found=(
                    f"{type(actions.sharders[path]).__qualname__} replaced this module; its "
                    "weights may have changed since"
                ),
                hint="keep a copy of the module to go back to",
            )
        )
    local = [each for each in installed.placed if hasattr(each.value, "_sharding_info")]
    owners = [module.get_submodule(fqn.rpartition(".")[0]) for each in local for _, _, fqn in each.places]
    for owner in dict.fromkeys(owners):  # a module under two names gets one hook
        installed.register(owner.register_state_dict_post_hook(InfoOnSave()), log)
    return installed
