"""Bridging a module and undoing it.

Both work in two steps: first all problems are found, by reading; then objects are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from tp_ddp_bridge._shared.norms import BRIDGED
from tp_ddp_bridge._shared.problems import Problem, raise_problems
from tp_ddp_bridge._shared.stale_parameters import is_stale, mark_stale
from tp_ddp_bridge._torch_compat import GRAD_HOOKS, local_of
from tp_ddp_bridge.layout import LEAF_TAGS, Layout, as_plain, is_local_shard, untag_replicated
from tp_ddp_bridge.module.survey import Survey, SurveyedTensor, survey
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
)
from tp_ddp_bridge.optim.state import as_list, repoint, repointing_problems

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
