"""Bridging a module and undoing it.

Both work in two steps: everything that can go wrong is found first, by reading; then objects are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ddp_bridge.hooks import carry_hooks, foreign_hooks, return_hooks
from tp_ddp_bridge.marks import WholeOn, mark_leaves, mark_plain, mark_plain_after_load, unmark_plain
from tp_ddp_bridge.optimizers import as_list, is_sharded, problems_of_all, repoint
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.stale import hand_back, hand_over, is_stale
from tp_ddp_bridge.survey import Found, Place, Survey, survey
from tp_ddp_bridge.view import View
from tp_ddp_bridge.view_class import BridgedModule, view_class

M = TypeVar("M", bound=nn.Module)


def is_bridged(module: nn.Module) -> bool:
    """Whether ``module``, or the module inside a DDP, was bridged (and not undone)."""
    return any(isinstance(submodule, BridgedModule) for submodule in module.modules())


def pre_dp_module_transform(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = (), buffers: bool = True) -> M:
    """Make a tensor-parallel module fit for ``DistributedDataParallel``.

    Every DTensor parameter is replaced by a local leaf, for good; reading it as an attribute gives a DTensor of the
    same layout. Names, order, ties, ``requires_grad``, gradients, user attributes and hooks stay. Calling it again
    changes nothing, except that DTensors that were added since, and ``optimizers`` that were forgotten, are taken
    along. Communicates nothing, unless a gradient or optimizer state lies otherwise than its parameter.

    Args:
        module: Changed in place. Its parameters may come from torch's ``parallelize_module``, tp-styles, or by hand.
        optimizers: Optimizers that hold DTensor parameters of ``module``; re-pointed in place, their state is kept.
        buffers: Whether DTensor buffers become local too (DDP cannot broadcast DTensors).

    Returns:
        ``module``.

    Raises:
        PlanError: Everything that is in the way; ``module`` and ``optimizers`` are as they were.
    """
    listed = as_list(optimizers)
    seen = survey(module, buffers=buffers)
    raise_what_is_in_the_way(seen, listed)
    new = [found for found in seen.found if not found.bridged]
    for found in new:
        _bridge(found)
    _open_root(module)
    _mark_plain(module, seen)
    for optimizer in listed:
        repoint(optimizer)
    return module


def raise_what_is_in_the_way(seen: Survey, optimizers: list[Optimizer]) -> None:
    """All problems of a module and of the optimizers that are to be re-pointed, in one error; communicates nothing."""
    targets = {id(found.tensor): found for found in seen.found if not found.bridged}

    def replaced(parameter: torch.Tensor) -> bool:
        return id(parameter) in targets or is_stale(parameter)

    def sharded(parameter: torch.Tensor) -> bool:
        target = targets.get(id(parameter))
        return is_sharded(parameter) if target is None else bool(target.layout.sharded_axes())

    problems = [*seen.problems, *problems_of_all(optimizers, replaced, sharded)]
    if problems:
        raise PlanError(problems, "the module cannot be bridged")


def _bridge(found: Found) -> None:
    """Exchange one DTensor for its leaf, under all its names."""
    tensor, layout = found.tensor, found.layout
    local = found.local.detach()
    leaf = nn.Parameter(local, requires_grad=tensor.requires_grad) if found.kind == "parameter" else local
    leaf.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_param"})
    if found.kind == "parameter":
        assert isinstance(leaf, nn.Parameter)
        carry_hooks(tensor, leaf, layout)
        if tensor.grad is not None:
            assert isinstance(tensor.grad, DTensor)
            leaf.grad = layout.localize(tensor.grad)
        if type(tensor) is DTensor:
            hand_over(tensor, leaf, found.name)
    for place in found.places:
        _put(place, found.kind, leaf)
        _add_view(place.owner, place.name, View(layout, found.kind, place.fqns[0], leaf.shape))


def _put(place: Place, kind: str, tensor: torch.Tensor) -> None:
    """Register ``tensor`` without what ``nn.Module.__setattr__`` does besides."""
    if kind == "parameter":
        assert isinstance(tensor, nn.Parameter)
        place.owner._parameters[place.name] = tensor
    else:
        place.owner._buffers[place.name] = tensor


def _add_view(owner: nn.Module, name: str, view: View) -> None:
    owner.__dict__.setdefault("_dp_views", {})[name] = view
    _set_class(owner)
    mark_leaves(owner)


def _set_class(owner: nn.Module) -> None:
    base = type(owner).__mro__[2] if isinstance(owner, BridgedModule) else type(owner)
    owner.__class__ = view_class(base, tuple(owner.__dict__["_dp_views"]))


def _open_root(module: nn.Module) -> None:
    """Let the module that was passed be the one whose call spans a forward."""
    if not isinstance(module, BridgedModule):
        module.__dict__["_dp_views"] = {}
        _set_class(module)


def _mark_plain(root: nn.Module, seen: Survey) -> None:
    """Say of plain parameters that every tensor-parallel rank holds the whole of them."""
    if not seen.laid_out:
        return
    mesh = max((found.layout.mesh for found in seen.laid_out), key=lambda mesh: mesh.size())
    if "_dp_plain" not in root.__dict__:
        root.register_load_state_dict_post_hook(mark_plain_after_load)
    root.__dict__["_dp_plain"] = WholeOn(mesh)
    mark_plain(root)


def undo_dp_transform(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = ()) -> M:
    """Give a bridged module its DTensor parameters back, with their gradients, attributes and hooks.

    Args:
        module: The module that was bridged, not the DDP around it; that DDP must not be used any more.
        optimizers: Optimizers that hold leaves of ``module``; re-pointed in place, their state is kept.

    Returns:
        ``module``, with the classes it had.

    Raises:
        PlanError: A hook was registered on a leaf, or an optimizer cannot be re-pointed; nothing was changed.
    """
    listed = as_list(optimizers)
    seen = survey(module)
    leaves = [found for found in seen.found if found.bridged]
    ids = {id(found.tensor) for found in leaves}
    problems = [problem for problem in seen.problems if problem.code == "already-wrapped"]
    problems += [
        Problem(
            "hook-on-leaf",
            found.name,
            found="a hook that was registered on the local leaf",
            hint="remove it; on the DTensor parameter it would see DTensors",
        )
        for found in leaves
        if found.kind == "parameter" and foreign_hooks(found.tensor)
    ]
    problems += problems_of_all(listed, lambda parameter: id(parameter) in ids or is_stale(parameter), lambda _: False)
    if problems:
        raise PlanError(problems, "the bridge cannot be undone")
    for found in leaves:
        _unbridge(found)
    for submodule in module.modules():
        _restore_class(submodule)
    for parameter in seen.plain.values():
        unmark_plain(parameter)
    for optimizer in listed:
        repoint(optimizer)
    return module


def _unbridge(found: Found) -> None:
    leaf, layout = found.tensor, found.layout
    dtensor: torch.Tensor = layout.wrap(leaf)
    marks = ("_sharding_info", "_dp_leaf", "_dp_assigned")
    attributes = {key: value for key, value in leaf.__dict__.items() if key not in marks}
    if found.kind == "parameter":
        assert isinstance(leaf, nn.Parameter)
        dtensor = nn.Parameter(dtensor, requires_grad=leaf.requires_grad)
        return_hooks(leaf, dtensor)
        if leaf.grad is not None:
            dtensor.grad = layout.wrap(leaf.grad)
        hand_back(leaf, dtensor, found.name)
    dtensor.__dict__.update(attributes)
    for place in found.places:
        _put(place, found.kind, dtensor)


def _restore_class(module: nn.Module) -> None:
    if isinstance(module, BridgedModule):
        module.__class__ = type(module).__mro__[2]
        del module.__dict__["_dp_views"]
        if module.__dict__.pop("_dp_plain", None) is not None:
            hooks = module._load_state_dict_post_hooks
            for key in [key for key, hook in hooks.items() if hook is mark_plain_after_load]:
                del hooks[key]


@contextmanager
def dp_bridge(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = (), buffers: bool = True) -> Iterator[M]:
    """Bridge ``module`` for the length of a ``with`` block; a block that raises is undone as well.

    Args:
        module: As in ``pre_dp_module_transform``.
        optimizers: As there; also re-pointed back at the end.
        buffers: As there.
    """
    listed = as_list(optimizers)
    pre_dp_module_transform(module, optimizers=listed, buffers=buffers)
    try:
        yield module
    finally:
        undo_dp_transform(module, optimizers=listed)


_pre_dp_module_transform = pre_dp_module_transform
