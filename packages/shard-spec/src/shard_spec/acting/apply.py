"""``plan.apply``: the parameters and buffers of a module become what the plan says; its forward is left alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shard_spec.acting.actions import ModuleActions, plan_together
from shard_spec.acting.agreement import agree, group_or_default
from shard_spec.acting.changes import Changes
from shard_spec.acting.express import Expression, express
from shard_spec.acting.gradients import LayGradient
from shard_spec.acting.handle import Placed, ShardHandle, no_way_back, user_attributes
from shard_spec.acting.install import install_module
from shard_spec.acting.local_parameter import LocalParameter, sharding_info
from shard_spec.acting.module import run_sharders
from shard_spec.acting.sources import (
    SOURCES,
    Initializer,
    Source,
    fingerprint,
    materialize,
    reset_parameters_of,
    reset_problems,
    scatter_to_all,
    take_own,
)
from shard_spec.acting.tensors import TensorAction, replacing_problems, tensor_at
from shard_spec.acting.ties import tied_outside
from shard_spec.layout import Layout
from shard_spec.mesh import MeshSpec
from shard_spec.plan.resolve import examine
from shard_spec.plan.sharding_plan import ShardingPlan
from shard_spec.plan.validate import validate
from shard_spec.problems import PlanError, Problem
from shard_spec.specs import as_sharder


def apply_plan(
    plan: ShardingPlan,
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    source: Source = "scatter",
    src_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    init: Initializer | str | None = None,
    seed: int = 0,
) -> ShardHandle:
    """Replace the parameters and buffers of ``module`` by their pieces, all or nothing; see ``ShardingPlan.apply``.

    Every tensor becomes a DTensor on ``mesh``, also those that the plan does not mention (replicated), and gradients
    are laid out like their parameters. A fused weight (``InterleavedShard`` along one axis, whole along the others)
    becomes a plain local parameter that carries ``_sharding_info`` with its sections; its gradient is the caller's
    business. Layouts that neither can say raise before anything moves.

    Args:
        plan: Its mesh, where it has one, has the axes of ``mesh``.
        module: The module.
        mesh: The ranks.
        source: ``"scatter"``: rank ``src_rank`` has the values, the others' are not looked at (and may be on meta).
            ``"local"``: every rank has all values; they are compared by checksum and nothing is sent.
            ``"meta"``: tensors on the meta device are made by ``init``; others are taken as with ``"local"``.
        src_rank: Rank in the group.
        group: A group of all ranks of the mesh. Needed only where a mesh of several axes does not hold all
            ranks.
        init: With ``source="meta"``: a function ``init(fqn, tensor)`` that fills a whole tensor in place, one at a
            time; or ``"reset_parameters"``, the modules' own; or None: pieces are filled with NaN (0 where the dtype
            has none), for loading a checkpoint.
        seed: Of the random numbers ``init`` draws. They depend on it and the FQN only, so that every layout, and every
            replica, gets the same values.

    Returns:
        A handle with ``plan``, ``actions``, ``undo()`` and ``report(path)``.

    Raises:
        PlanError: With every problem of every rank, before anything moved.
    """
    group = _group_of(mesh, group)
    settings = (source, src_rank, init, seed)
    actions, outcome = plan_together(lambda: _plan(plan, module, mesh, group, *settings))
    agree(group, outcome, "apply")
    assert actions is not None
    changes = Changes()
    try:
        fill = _initializer(init, module, actions, seed)
        staged = [_piece(module, action, actions, mesh, group, source, fill, seed) for action in actions.tensors]
        replaced = run_sharders(module, actions, group, changes)
        handle = _install(plan, module, actions, staged, replaced, group, changes)
    except BaseException:
        changes.roll_back()
        raise
    changes.forget()
    return handle


# ---- planning -------------------------------------------------------------------------------------------------------


def _group_of(mesh: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of all ranks of the mesh.

    Raises:
        PlanError: ``not-a-mesh``, ``rank-outside-mesh``, ``group-needed`` or ``group-mismatch``; no rank was told.
    """
    if not isinstance(mesh, DeviceMesh):
        found = f"{mesh!r:.200} of type {type(mesh).__qualname__}"
        hint = "give a DeviceMesh, from init_device_mesh or mesh_spec.to_device_mesh('cuda')"
        raise PlanError(Problem("not-a-mesh", "mesh", found=found, hint=hint))
    ranks = sorted(mesh.mesh.flatten().tolist())
    if mesh.get_coordinate() is None:
        found, hint = f"rank {dist.get_rank()} is not on the mesh of ranks {ranks}", "call it on ranks of the mesh only"
        raise PlanError(Problem("rank-outside-mesh", "mesh", found=found, hint=hint))
    if group is None and mesh.ndim == 1:
        return mesh.get_group()
    if group is None and len(ranks) == dist.get_world_size():
        return group_or_default(None)
    if group is None:
        found = f"a mesh of {mesh.ndim} axes over {len(ranks)} of {dist.get_world_size()} ranks"
        hint = "pass group=, a process group of all ranks of the mesh"
        raise PlanError(Problem("group-needed", "group", found=found, hint=hint))
    members = sorted(dist.get_process_group_ranks(group_or_default(group)))
    if members != ranks:
        found, hint = f"a group of ranks {members} for a mesh of ranks {ranks}", "pass the group of the mesh's ranks"
        raise PlanError(Problem("group-mismatch", "group", found=found, hint=hint))
    return group


def _plan(
    plan: ShardingPlan,
    module: nn.Module,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    source: Source,
    src_rank: int,
    init: Initializer | str | None,
    seed: int,
) -> ModuleActions:
    """What is done to each tensor; changes and sends nothing."""
    spec = MeshSpec.from_device_mesh(mesh)
    problems = _argument_problems(source, src_rank, dist.get_world_size(group), init)
    problems += _mesh_order_problems(mesh)
    if plan.mesh is None and not any(isinstance(value, Layout) for value in plan.plan.values()):
        plan = plan.with_mesh(spec)
    found = examine(plan, module)
    problems += validate(plan, module)
    if plan.output_plan or plan.return_local_tensor:
        text = "apply changes no forward, so output_plan and return_local_tensor have no effect"
        problems.append(Problem("no-effect", "output_plan", found=text, hint="use shard_module, or leave them out"))
    tensors: list[TensorAction] = []
    fingerprints = []
    me = dist.get_rank(group)
    for facts in found.facts.tensors:
        layout = found.layouts.get(facts.name)
        if layout is None:
            continue
        tensor = tensor_at(module, facts.name)
        problems += replacing_problems(tensor, facts.name)
        problems += _value_problems(tensor, facts.name, source, me == src_rank)
        rebound = _on_mesh(layout, spec, facts.name)
        expression = rebound if isinstance(rebound, Problem) else express(rebound, facts.shape, facts.name, local=True)
        if isinstance(rebound, Problem) or isinstance(expression, Problem):
            problems += [each for each in (rebound, expression) if isinstance(each, Problem)]
            continue
        tensors.append(
            TensorAction(facts.aliases, facts.kind, facts.shape, tensor.dtype, bool(tensor.requires_grad), rebound)
        )
        if source != "scatter":
            fingerprints.append(f"{facts.name}: {'meta' if tensor.is_meta else fingerprint(tensor)}")
    problems += tied_outside(module, [action.names[0] for action in tensors])
    if source == "meta" and init == "reset_parameters":
        problems += reset_problems(module, tuple(a.names[0] for a in tensors if tensor_at(module, a.names[0]).is_meta))
    return ModuleActions(
        tensors=tuple(tensors),
        sharders={path: as_sharder(sharder) for path, sharder in sorted(found.sharders.items())},
        src_rank=src_rank,
        source=_source_text(source, src_rank, init, seed),
        values=tuple(fingerprints),
        device=_device(mesh),
        problems=tuple(dict.fromkeys(problems)),
    )


def _argument_problems(source: object, src_rank: object, size: int, init: object) -> list[Problem]:
    problems = []
    if source not in SOURCES:
        hint = f"one of {', '.join(map(repr, SOURCES))}"
        problems.append(Problem("unknown-source", "source", found=repr(source), hint=hint))
    if not isinstance(src_rank, int) or isinstance(src_rank, bool) or not 0 <= src_rank < size:
        hint = f"a rank in the group, 0 to {size - 1}"
        problems.append(Problem("src-rank-out-of-range", "src_rank", found=repr(src_rank), hint=hint))
    if init is not None and source != "meta":
        found, hint = f"init= with source={source!r}", "init fills meta tensors: use source='meta', or leave it out"
        problems.append(Problem("no-effect", "init", found=found, hint=hint))
    if not (init is None or init == "reset_parameters" or callable(init)):
        hint = "a function init(fqn, tensor), 'reset_parameters', or None"
        problems.append(Problem("unknown-init", "init", found=repr(init), hint=hint))
    return problems


def _mesh_order_problems(mesh: DeviceMesh) -> list[Problem]:
    """Axes whose process group has another order than the mesh: gathers over it would be silently permuted."""
    problems = []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in range(mesh.ndim):
        index = tuple(slice(None) if at == axis else here for at, here in enumerate(coordinate))
        along = mesh.mesh[index].tolist()
        members = dist.get_process_group_ranks(mesh.get_group(axis))
        if along != members:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            found = f"ranks {along} along the axis, {members} in its process group"
            hint = "torch gathers in the order of the group: use ascending ranks, or DeviceMesh.from_group"
            problems.append(Problem("mesh-order", "mesh", axis=name, found=found, hint=hint))
    return problems


def _value_problems(tensor: torch.Tensor, name: str, source: object, is_source: bool) -> list[Problem]:
    if tensor.is_meta and (source == "local" or (source == "scatter" and is_source)):
        hint = "load values first, or use source='meta'"
        return [Problem("meta-on-source", name, found="a meta tensor where values are needed", hint=hint)]
    return []


def _on_mesh(layout: Layout, mesh: MeshSpec, name: str) -> Layout | Problem:
    """The same layout on the ranks of the live mesh: a plan is made for axes, whichever ranks they turn out to be."""
    same_axes = layout.mesh.axis_names == mesh.axis_names and layout.mesh.shape == mesh.shape
    from_spec = layout.mesh.ndim == mesh.ndim == 1 and tuple(layout.mesh.ranks) == tuple(mesh.ranks)
    if same_axes or from_spec:
        order = [mesh.axis_names[layout.mesh.axis_names.index(axis)] for axis in layout.order]
        return Layout(mesh, layout.terms, order)
    found = f"{layout} on the axes {layout.mesh} of ranks {list(layout.mesh.ranks)}; the mesh has {mesh}"
    hint = "give the plan the axes of the mesh, in its order"
    return Problem("mesh-mismatch", name, found=found, hint=hint)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _source_text(source: object, src_rank: int, init: object, seed: int) -> str:
    if source == "scatter":
        return f"rank {src_rank} of the group"
    if source == "meta":
        how = getattr(init, "__qualname__", repr(init))
        return f"meta tensors filled by {how} with seed {seed}"
    return "every rank's own values"


# ---- moving and installing ------------------------------------------------------------------------------------------


def _initializer(
    init: Initializer | str | None, module: nn.Module, actions: ModuleActions, seed: int
) -> Initializer | None:
    if isinstance(init, str):
        return reset_parameters_of(module, actions.device, seed)
    return init


def _piece(
    module: nn.Module,
    action: TensorAction,
    actions: ModuleActions,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    source: Source,
    init: Initializer | None,
    seed: int,
) -> torch.Tensor:
    """This rank's piece, as a DTensor or a local parameter."""
    tensor, layout, device = tensor_at(module, action.names[0]), action.layout, actions.device
    assert layout is not None
    if source == "scatter":
        full = tensor if dist.get_rank(group) == actions.src_rank else None
        local = scatter_to_all(full, layout, action, device, group, actions.src_rank, mesh)
    elif tensor.is_meta:
        local = materialize(action, device, dist.get_rank(), init, seed)
    else:
        local = take_own(tensor, layout, device, dist.get_rank())
    expression = express(layout, action.shape, action.names[0], local=True)
    assert isinstance(expression, Expression)  # planned
    if expression.kind == "local":
        return _local(local, action, mesh, expression)
    placements = [Replicate() if dim is None else Shard(dim) for dim in expression.dims]
    shape = torch.Size(action.shape)
    stride = torch.empty(shape, device="meta").stride()
    value = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if action.kind == "buffer":
        return value
    parameter = nn.Parameter(value, requires_grad=action.requires_grad)
    if parameter.requires_grad:
        parameter.register_hook(LayGradient(tuple(placements)))  # type: ignore[no-untyped-call]  # untyped in torch
    return parameter


def _local(local: torch.Tensor, action: TensorAction, mesh: DeviceMesh, expression: Expression) -> torch.Tensor:
    info = sharding_info(mesh, expression, action.shape)
    if action.kind == "parameter":
        parameter = LocalParameter(local, action.requires_grad)
        parameter._sharding_info = info
        return parameter
    local._sharding_info = info  # type: ignore[attr-defined]  # the house's way to say what a local tensor is
    return local


def _install(
    plan: ShardingPlan,
    module: nn.Module,
    actions: ModuleActions,
    staged: list[torch.Tensor],
    replaced: dict[str, nn.Module],
    group: dist.ProcessGroup,
    changes: Changes,
) -> ShardHandle:
    placed = []
    checks: list[Callable[[], Problem | None]] = []
    for action, value in zip(actions.tensors, staged, strict=True):
        assert action.layout is not None
        old = tensor_at(module, action.names[0])
        if action.kind == "parameter":
            value.__dict__.update(user_attributes(old))
        places = []
        for fqn in action.names:
            path, _, name = fqn.rpartition(".")
            owner = module.get_submodule(path)
            changes.set_tensor(owner, name, value)
            places.append((owner, name, fqn))
        placed.append(Placed(tuple(places), value, weakref.ref(old), action.layout, action.shape))
    for path, new in replaced.items():
        install_module(module, path, new, changes)
        checks.append(no_way_back(path, actions.sharders[path]))
    return ShardHandle(plan, actions, module, group, placed, [], checks)
