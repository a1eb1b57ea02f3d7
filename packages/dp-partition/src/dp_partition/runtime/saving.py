"""Between placed models and files: what is loaded is sharded, and `torch.save` writes full tensors or raises.

A file of one rank's shards lacks the rows of all others, and a plain process cannot load it. Within a step of
`distribute` all ranks run the same line, so a shard is gathered there, as for ``item()``. Between calls rank 0 may be
alone: a replicated tensor is written as a plain one, and a shard raises. DCP pickles no DTensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import without_fsdp

# By thread: for each step in shards that it runs, a function that raises on all ranks unless all of them call it.
running: dict[int, list[Callable[[], None]]] = {}

_PICKLE, _COPY = "__reduce_ex__", "__deepcopy__"  # `pickle` and `copy` ask the object, then its class


class Pickled:
    """Attribute ``__reduce_ex__`` of a DTensor in a state dict: its plain tensor if it is replicated, else an error."""

    def __init__(self, tensor: DTensor, name: str) -> None:
        self.name = name
        self.full = tensor._local_tensor if all(place.is_replicate() for place in tensor.placements) else None

    def __call__(self, protocol: Any) -> Any:
        if self.full is None:
            reason = "lies in shards: a file of this rank lacks the rows of the others"
            hint = "with step.unsharded(): torch.save(model.state_dict(), path), on every rank; for shards, and "
            hint += "for an optimizer, torch.distributed.checkpoint.save(get_state_dict(model, optimizer))"
            raise PlanError(Problem("already-applied", f"a pickle of {self.name}", found=reason, hint=hint))
        return self.full.__reduce_ex__(protocol)


class _Guard:
    """Refuses copies and pickles of a placed module by name, until it is removed. FSDP2 names no way on for a copy."""

    def __init__(self, module: nn.Module) -> None:
        self.own = vars(module)
        refuse = partial(
            _refuse_copy, without_fsdp(module)[0].__name__
        )  # not of the module: no circle keeps its memory
        self.own.update({_PICKLE: refuse, _COPY: refuse})

    def remove(self) -> None:
        for key in (_PICKLE, _COPY):
            self.own.pop(key, None)


def _refuse_copy(name: str, *_: Any) -> NoReturn:
    hint = "with step.unsharded(): copy.deepcopy(model), or torch.save(model, path), on every rank: both are plain"
    reason = "its parameters are placed on the ranks, and a copy does not gather them"
    raise PlanError(Problem("already-applied", f"a copy of {name}", found=reason, hint=hint))


def hook_placed(
    roots: Iterable[nn.Module], optimizers: Iterable[Optimizer], place_state: Callable[[Optimizer], None] | None = None
) -> list[Any]:
    """Hook placed models and their optimizers for loading and saving; return the handles.

    ``place_state`` shards what was loaded into an optimizer; None: something else does.
    """
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    placed = [module for module in modules if any(isinstance(p, DTensor) for p in module.parameters())]
    handles: list[Any] = [_Guard(module) for module in placed]
    handles += [module.register_load_state_dict_pre_hook(place_loaded) for module in placed]
    handles += [module.register_state_dict_post_hook(mark_parameters) for module in placed]
    # A wrapper that leaves out torch's own initialisation has no tables of hooks; the optimizer in it has them.
    hooked = [optimizer for optimizer in optimizers if hasattr(optimizer, "_optimizer_state_dict_post_hooks")]
    handles += [optimizer.register_state_dict_post_hook(mark_states) for optimizer in hooked]
    if place_state is not None:
        handles += [optimizer.register_load_state_dict_post_hook(place_state) for optimizer in hooked]
    return handles


def place_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Shard full plain tensors of a state dict for a module's DTensors. The same file is loaded on every rank."""
    parameters: dict[str, Any] = module._parameters
    for name, parameter in parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:  # else load_state_dict names the sizes
            layout, full = (parameter.device_mesh, parameter.placements), value.detach().to(parameter.device)
            state_dict[prefix + name] = distribute_tensor(full, *layout, src_data_rank=None)


def mark_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Mark a module's own DTensors in its state dict for pickle; a hook of ``state_dict()``."""
    for name in module._parameters:
        _mark(prefix + name, state_dict.get(prefix + name))


def mark_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Mark the DTensors in the state dict of an optimizer for pickle; a hook of ``state_dict()``."""
    for number, state in state_dict["state"].items():
        for key, value in state.items():
            _mark(f"{key} of parameter {number}", value)


def _mark(name: str, value: Any) -> None:
    # A parameter itself (`keep_vars=True`) gets no attribute, as its successors would have it too.
    if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and threading.get_ident() not in running:
        vars(value)[_PICKLE] = Pickled(value, name)


def reduced_in_step(tensor: DTensor, protocol: Any) -> Any:
    """Reduce a shard for pickle within a step: the full tensor, gathered once all ranks are here."""
    for meet in running.get(threading.get_ident(), [])[-1:]:
        meet()
    return tensor.full_tensor().__reduce_ex__(protocol)
