"""Installing: what was scattered takes its place in the module, with the hooks and forwards that it needs.

Everything here is local, and logged, so that a call that fails can take it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._shared.problems import Problem
from shard_spec.apply.execution_plan import ExecutionPlan
from shard_spec.apply.handle import Placed, ShardHandle, no_way_back, still_ours, user_attributes
from shard_spec.apply.sharders import install_module
from shard_spec.apply.tensors import TensorAction, tensor_at
from shard_spec.apply.transaction import Transaction
from shard_spec.distributed.mesh_cache import MeshCache
from shard_spec.legacy.forward_context import ForwardContext
from shard_spec.legacy.module_tracker import ModuleTracker
from shard_spec.legacy.outputs import LocalRows, PostForwardHook, PreForwardHook, ReshardOutput
from shard_spec.legacy.supported_modules import forward_for


def install(
    module: nn.Module,
    plan: Any,
    actions: ExecutionPlan,
    staged: dict[str, torch.Tensor],
    replaced: dict[str, nn.Module],
    context: ForwardContext,
    meshes: MeshCache,
    transaction: Transaction,
) -> ShardHandle:
    """Put everything in its place; local, and logged in ``transaction``."""
    placed: list[Placed] = []
    removals: list[Callable[[], None]] = []
    checks: list[Callable[[], Problem | None]] = []
    for action in actions.tensors:
        if action.layout is None:
            _install_whole(module, action, staged[action.names[0]], transaction)
        else:
            placed.append(_install_piece(module, action, staged[action.names[0]], transaction))
    for path, new in replaced.items():
        install_module(module, path, new, transaction)
        checks.append(no_way_back(path, actions.sharders[path]))
    for path, layout in actions.forwards.items():
        owner = module.get_submodule(path)
        kind = forward_for(owner)
        assert kind is not None
        before = owner.__dict__.get("forward")
        forward = kind(owner, path, context, layout)
        transaction.set_attribute(owner, "forward", forward)
        removals.append(_restorer(owner, "forward", before))
        checks.append(still_ours(owner, "forward", forward, path))
        _register(owner.register_forward_pre_hook(KeepSlowPath()), transaction, removals)
    _install_hooks(module, actions, context, meshes, transaction, removals)
    return ShardHandle(plan, actions, module, context.group.group, placed, removals, checks)


def _install_whole(module: nn.Module, action: TensorAction, value: torch.Tensor, transaction: Transaction) -> None:
    old = tensor_at(module, action.names[0])
    if not old.is_meta:
        transaction.overwrite(old, value.to(old.device))
        return
    new = nn.Parameter(value, requires_grad=action.requires_grad) if action.kind == "parameter" else value
    new.__dict__.update(user_attributes(old))
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        transaction.set_tensor(module.get_submodule(path), name, new)


def _install_piece(module: nn.Module, action: TensorAction, value: torch.Tensor, transaction: Transaction) -> Placed:
    old = tensor_at(module, action.names[0])
    assert action.layout is not None
    if action.kind == "parameter":
        value = nn.Parameter(value, requires_grad=action.requires_grad)
        value.__dict__.update(user_attributes(old))
    places = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        owner = module.get_submodule(path)
        transaction.set_tensor(owner, name, value)
        places.append((owner, name, fqn))
    return Placed(tuple(places), value, weakref.ref(old), action.layout, action.shape)


def _install_hooks(
    module: nn.Module,
    actions: ExecutionPlan,
    context: ForwardContext,
    meshes: MeshCache,
    transaction: Transaction,
    removals: list[Callable[[], None]],
) -> None:
    for path, wanted in actions.outputs.items():
        hook = ReshardOutput(path, wanted, context, meshes)
        _register(module.get_submodule(path).register_forward_hook(hook), transaction, removals)
    for path in actions.locals:
        rows = LocalRows(path, context, path in actions.outputs)
        _register(module.get_submodule(path).register_forward_hook(rows), transaction, removals)
    names = actions.replicas or _siblings(module, actions)
    tracker = ModuleTracker(context.group, module, names, everything=actions.everything)
    transaction.on_rollback(tracker.remove)
    removals.append(tracker.remove)
    tracker.scan(module)
    laid_out = "" in actions.outputs or "" in actions.locals or not actions.everything
    _register(module.register_forward_pre_hook(PreForwardHook(context, tracker), prepend=True), transaction, removals)
    _register(
        module.register_forward_hook(PostForwardHook(context, is_laid_out=laid_out), always_call=True),
        transaction,
        removals,
    )


def _siblings(module: nn.Module, actions: ExecutionPlan) -> tuple[str, ...]:
    """The replicated parameters of the modules that got a sharded forward."""
    names = []
    for path in actions.forwards:
        for name, value in module.get_submodule(path)._parameters.items():
            if value is not None and not isinstance(value, DTensor):
                names.append(f"{path}.{name}" if path else name)
    return tuple(names)


class KeepSlowPath:
    """A forward pre-hook that does nothing: nn.TransformerEncoderLayer reads weights past modules without hooks."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing."""


def _register(handle: Any, transaction: Transaction, removals: list[Callable[[], None]]) -> None:
    transaction.on_rollback(handle.remove)
    removals.append(handle.remove)


def _restorer(module: nn.Module, name: str, before: object) -> Callable[[], None]:
    def restore() -> None:
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before

    return restore
