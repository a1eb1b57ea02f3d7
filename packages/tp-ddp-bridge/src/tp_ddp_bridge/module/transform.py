"""Bridging a module and undoing it.

Both work in two steps: first all problems are found, by reading; then objects are exchanged.

Survey of a module: its DTensors, their registrations, and every problem. Reads only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ddp_bridge._shared.norms import BRIDGED
from tp_ddp_bridge._shared.problems import Problem, raise_problems
from tp_ddp_bridge._shared.stale_parameters import is_stale, mark_stale
from tp_ddp_bridge._torch_compat import GRAD_HOOKS, WEIGHT_NORMS, default_axis_order, local_of, torch_bridged
from tp_ddp_bridge.layout import (
    LEAF_TAGS,
    Layout,
    as_plain,
    is_local_shard,
    is_replicated_tag,
    layout_of,
    untag_replicated,
)
from tp_ddp_bridge.module.view import (
    Bridge,
    BridgedModule,
    GradHooks,
    LeafTable,
    View,
    hook_problems,
    refuse_gradients,
    restore_class,
    set_views,
    tag_all,
    views_of,
)
from tp_ddp_bridge.optim.state import as_list, repoint, repointing_problems


@dataclass(eq=False)
class SurveyedTensor:
    """One DTensor or leaf with all its registrations.

    Attributes:
        tensor: The registered object.
        layout: Its layout.
        kind: ``"parameter"`` or ``"buffer"``.
        is_leaf: ``tensor`` is a leaf already.
        name: Its first FQN.
        registrations: Each owner, the tensor's name in it and its FQN, in the module's order; several for a tie.
    """

    tensor: torch.Tensor
    layout: Layout
    kind: str
    is_leaf: bool
    name: str
    registrations: list[tuple[nn.Module, str, str]] = field(default_factory=list)


@dataclass(eq=False)
class Survey:
    """All tensors of a module for the bridge.

    Attributes:
        bridgeable: DTensors, and existing leaves; ties once.
        meshes: Meshes of DTensors, leaves, and local shards of other packages, which stay as they are.
        plain: The other parameters, by their first name.
        problems: All reasons against bridging the module.
    """

    bridgeable: list[SurveyedTensor]
    meshes: list[DeviceMesh]
    plain: dict[str, nn.Parameter]
    problems: list[Problem]


def survey(module: nn.Module) -> Survey:
    """Collect every DTensor of ``module``, every leaf, and every problem."""
    bridgeable: dict[int, SurveyedTensor] = {}  # by id: ties are one
    meshes: list[DeviceMesh] = []
    plain: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, owner in module.named_modules():
        views: dict[str, View] = views_of(owner)  # of an earlier bridge
        tables = {"parameter": owner._parameters, "buffer": owner._buffers}
        for kind, name, tensor in ((kind, *item) for kind, table in tables.items() for item in table.items()):
            if tensor is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            layout = Layout.of(tensor) if isinstance(tensor, DTensor) else None
            if layout is None and name in views:
                layout = views[name].layout
            if layout is not None:
                entry = SurveyedTensor(tensor, layout, kind, not isinstance(tensor, DTensor), fqn)
                bridgeable.setdefault(id(tensor), entry).registrations.append((owner, name, fqn))
            elif kind == "parameter":
                layout = None if is_replicated_tag(tensor) else layout_of(tensor)
                if layout is None:
                    assert isinstance(tensor, nn.Parameter)
                    plain.setdefault(id(tensor), (fqn, tensor))
            if layout is not None:
                meshes.append(layout.mesh)
    problems = list(_module_problems(module))
    for each in bridgeable.values():
        problems += _tensor_problems(each)
    reason, hint = "an uninitialized parameter", "run the module once before bridging"
    problems += [
        Problem("uninitialized-parameter", name, found=reason, hint=hint)
        for name, parameter in plain.values()
        if nn.parameter.is_lazy(cast(torch.Tensor, parameter))
    ]
    return Survey(list(bridgeable.values()), meshes, dict(plain.values()), problems)


def _module_problems(module: nn.Module) -> Iterator[Problem]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no module is one of its
    is_bridged = any(isinstance(part, BridgedModule) for part in module.modules())
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            yield Problem(
                "already-applied",
                name,
                found="a DistributedDataParallel",
                hint="pass its .module; a model is bridged before DDP wraps it",
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            yield Problem("unsupported-wrapper", name, found="a ScriptModule", hint="use the module as plain PyTorch")
        if fsdp is not None and isinstance(submodule, fsdp.FSDPModule):
            yield Problem(
                "unsupported-wrapper",
                name,
                found="an FSDP module",
                hint="FSDP shards over the data axis itself; use it without DDP",
            )
        if not is_bridged and torch_bridged(submodule):  # else it ran on leaves, without effect
            yield Problem(
                "unsupported-wrapper",
                name,
                found="torch's own _pre_dp_module_transform ran on it (and made frozen parameters trainable)",
                hint="build it again and use wrap_ddp(module, mesh=mesh), or bridge before DDP(device_mesh=...)",
            )
        parts = (*submodule.children(), *submodule._forward_pre_hooks.values())
        norms = [each.dim for each in parts if isinstance(each, WEIGHT_NORMS)]  # magnitude, direction: registered last
        trained = [p for p in list(submodule._parameters.values())[-2:] if isinstance(p, DTensor) and p.requires_grad]
        if trained and any(dim in (0, trained[-1].ndim - 1) for dim in norms):  # torch fuses these
            yield Problem(
                "module-not-shardable",
                name,
                found="weight_norm has no backward for DTensors",
                hint="leave this layer out of tensor parallelism, or freeze it",
            )


def _tensor_problems(surveyed: SurveyedTensor) -> Iterator[Problem]:
    layout, tensor, name = surveyed.layout, surveyed.tensor, surveyed.name
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        if placement.is_partial():
            yield Problem(
                "partial-value",
                name,
                axis=axis,
                found=f"placement {placement}",
                hint="redistribute it to Shard or Replicate before bridging",
            )
    if layout.mesh.get_coordinate() is None:
        yield Problem(
            "rank-outside-mesh",
            name,
            found="this rank is not in the tensor's mesh",
            hint="bridge it on the mesh's ranks only",
        )
    if isinstance(tensor, DTensor):
        if not default_axis_order(tensor):
            yield Problem(
                "invalid-layout",
                name,
                found="mesh axes that share a tensor dim shard it in another order than the mesh's",
                hint="redistribute it to Shard placements in mesh order",
            )
        device = local_of(tensor).device.type
        if device not in (layout.mesh.device_type, "meta"):
            yield Problem(
                "device-mismatch",
                name,
                found=f"local tensor on {device!r}, mesh for {layout.mesh.device_type!r}",
                hint="move the module to the mesh's device first",
            )


M = TypeVar("M", bound=nn.Module)


def is_bridged(module: nn.Module) -> bool:
    """Return True if ``module``, or the module inside a DDP, was bridged (and not undone)."""
    return any(isinstance(submodule, BridgedModule) for submodule in module.modules())


def transform(module: M, optimizers: list[Optimizer]) -> M:
    """Exchange every DTensor of ``module`` for a leaf, and re-point ``optimizers``; see ``pre_dp_module_transform``."""
    surveyed = survey(module)
    raise_problems(bridging_problems(surveyed, optimizers), "the module cannot be bridged")
    for each in surveyed.bridgeable:
        if not each.is_leaf:
            _bridge(each)
    _make_root(module, surveyed)
    for optimizer in optimizers:
        repoint(optimizer)
    return module


def bridging_problems(surveyed: Survey, optimizers: list[Optimizer]) -> list[Problem]:
    """Return all problems of a module and of optimizers to re-point; communicates nothing."""
    targets = {id(each.tensor): each for each in surveyed.bridgeable if not each.is_leaf}

    def is_replaced(parameter: torch.Tensor) -> bool:
        return id(parameter) in targets or is_stale(parameter)

    def is_sharded(parameter: torch.Tensor) -> bool:  # becomes a shard, or is one
        target = targets.get(id(parameter))
        return is_local_shard(parameter) if target is None else bool(target.layout.sharded_axes())

    hooks = [each for target in targets.values() for each in hook_problems(target.name, target.tensor)]
    return [*surveyed.problems, *hooks, *repointing_problems(optimizers, is_replaced, is_sharded)]


def _bridge(surveyed: SurveyedTensor) -> None:
    """Exchange one DTensor for its leaf, under all its names."""
    tensor, layout = surveyed.tensor, surveyed.layout
    assert isinstance(tensor, DTensor)
    leaf = local_of(tensor).detach()  # the same memory
    is_parameter = surveyed.kind == "parameter"
    if is_parameter:
        leaf = nn.Parameter(leaf, requires_grad=tensor.requires_grad)
    leaf.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_param"})
    if is_parameter:
        if hooks := getattr(tensor, GRAD_HOOKS):
            leaf.register_hook(GradHooks(hooks, layout))
        leaf.grad = None if tensor.grad is None else layout.localize(tensor.grad)
        mark_stale(
            tensor,
            Problem(
                "parameter-replaced",
                surveyed.name,
                found="a local leaf took its place when the module was bridged for data parallelism",
                hint="pass the optimizer that still holds it, pre_dp_module_transform(module, optimizers=[optimizer])"
                " (this can "
                "be done later, too), or build it afterwards",
            ),
            leaf,
        )
        refuse_gradients(tensor, surveyed.name)
    _register(surveyed, leaf)
    for owner, name, fqn in surveyed.registrations:
        set_views(owner, {name: View(layout, surveyed.kind, fqn, leaf.shape)})


def _register(surveyed: SurveyedTensor, tensor: torch.Tensor) -> None:
    # Not by setattr: nn.Module.__setattr__ refuses to exchange some of them, and hooks of users would run.
    for owner, name, _ in surveyed.registrations:
        table: dict[str, Any] = owner._parameters if surveyed.kind == "parameter" else owner._buffers
        table[name] = tensor


def _make_root(module: nn.Module, surveyed: Survey) -> None:
    """Make one call of ``module`` span a forward, and tag its plain parameters as replicated."""
    if not isinstance(module, BridgedModule):
        set_views(module, {})
    if not surveyed.meshes:
        return
    bridge: Bridge = module.__dict__[BRIDGED]
    if bridge.replicated_on is None:
        module.register_load_state_dict_post_hook(tag_all)  # `assign=True` registers new parameters
    mesh = max(surveyed.meshes, key=lambda mesh: mesh.size())
    bridge.replicated_on = Layout(mesh, (Replicate(),) * mesh.ndim, torch.Size(), ())
    tag_all(module)
    for submodule in module.modules():
        if submodule._parameters:
            submodule.__dict__["_parameters"] = LeafTable(submodule._parameters)


def undo_dp_transform(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = ()) -> M:
    """Restore a bridged module's DTensor parameters, with their gradients, attributes and hooks.

    Args:
        module: The bridged module, not the DDP around it; that DDP must not be used any more.
        optimizers: Optimizers with leaves of ``module``; re-pointed in place, their state is kept.

    Returns:
        ``module``, with its former classes.

    Raises:
        PlanError: A hook was registered on a leaf, or an optimizer cannot be re-pointed; nothing was changed.
    """
    listed = as_list(optimizers)
    surveyed = survey(module)
    leaves = {id(each.tensor): each for each in surveyed.bridgeable if each.is_leaf}
    problems = [problem for problem in surveyed.problems if problem.code == "already-applied"]
    problems += [each for leaf in leaves.values() for each in hook_problems(leaf.name, leaf.tensor)]
    problems += repointing_problems(listed, lambda each: id(each) in leaves or is_stale(each), lambda _: False)
    raise_problems(problems, "the bridge cannot be undone")
    for each in leaves.values():
        _unbridge(each)
    for submodule in module.modules():
        restore_class(submodule)
    for parameter in surveyed.plain.values():
        untag_replicated(parameter)
    for optimizer in listed:
        repoint(optimizer)
    return module


def _unbridge(surveyed: SurveyedTensor) -> None:
    """Exchange one leaf for its DTensor, under all its names."""
    leaf, layout = surveyed.tensor, surveyed.layout
    as_plain([leaf])
    dtensor: torch.Tensor = layout.wrap(leaf)  # the same memory
    if surveyed.kind == "parameter":
        dtensor = nn.Parameter(dtensor, requires_grad=leaf.requires_grad)
        for each in (getattr(leaf, GRAD_HOOKS) or {}).values():
            setattr(dtensor, GRAD_HOOKS, each.hooks)
        dtensor.grad = None if leaf.grad is None else layout.wrap(leaf.grad)
    dtensor.__dict__.update({key: value for key, value in leaf.__dict__.items() if key not in LEAF_TAGS})
    if surveyed.kind == "parameter":
        mark_stale(
            leaf,
            Problem(
                "parameter-replaced",
                surveyed.name,
                found="a DTensor took the place of this local leaf when the bridge was undone",
                hint="pass the optimizer that still holds it, undo_dp_transform(module, optimizers=[optimizer]) (this"
                " can be "
                "done later, too); bridge the module and wrap it again to go on with data parallelism",
            ),
            dtensor,
        )
    _register(surveyed, dtensor)
