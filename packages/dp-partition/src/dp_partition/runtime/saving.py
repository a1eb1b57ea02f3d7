"""Between placed models and files: what is loaded is sharded, and `torch.save` writes full tensors or raises.

A file of one rank's shards lacks the rows of all others, and a plain process cannot load it. Within a step of
`distribute` all ranks run the same line, so a shard is gathered there, as for ``item()``. Between calls rank 0 may be
alone: a replicated tensor is written as a plain one, and a shard raises. DCP pickles no DTensor.

A DTensor that is computed of a placed one, such as ``weight.half()``, has no mark of ours. But it lies on the same mesh
object, so placed tensors get a mesh of their own (`own_mesh`), which is equal to the caller's and refuses pickle.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem

# By thread: the traps around each step in shards that it runs. Their `meet` raises on all ranks unless all call it.
running: dict[int, list[Any]] = {}

PICKLE, COPY = "__reduce_ex__", "__deepcopy__"  # `pickle` and `copy` ask the object, then its class


class Pickled:
    """Attribute ``__reduce_ex__`` of a DTensor in a state dict: its plain tensor if it is replicated, else an error."""

    def __init__(self, tensor: DTensor, name: str) -> None:
        self.name = name
        self.full = tensor._local_tensor if all(place.is_replicate() for place in tensor.placements) else None

    def __call__(self, protocol: Any) -> Any:
        if self.full is None:
            raise _refused(self.name, "lies in shards: a file of this rank lacks the rows of the others")
        return self.full.__reduce_ex__(protocol)


def _refused(name: str, found: str) -> PlanError:
    hint = (
        "with step.unsharded(): torch.save(model.state_dict(), path), on every rank; for shards, and for an optimizer, "
        "torch.distributed.checkpoint.save(get_state_dict(model, optimizer))"
    )
    return PlanError(Problem("already-applied", f"a pickle of {name}", found=found, hint=hint))


def _refuse_on_mesh(protocol: Any) -> NoReturn:
    raise _refused("a DTensor", "is placed, or computed of placed parameters: a file may lack the rows of other ranks")


def own_mesh(mesh: Any) -> DeviceMesh:
    """Return an equal mesh, whose tensors are not pickled. Those on the caller's mesh are pickled as ever.

    Once a model is placed on it, a number of a partial sum on it is refused, see `refuse_reads`.
    """
    if not isinstance(mesh, DeviceMesh) or PICKLE in vars(mesh):  # a fake one of `estimate`; one of a shared step
        return mesh  # type: ignore[no-any-return]
    own = object.__new__(DeviceMesh)
    vars(own).update({**vars(mesh), PICKLE: _refuse_on_mesh, COPY: lambda memo: own})  # copies of tensors share it
    return own


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
        vars(value)[PICKLE] = Pickled(value, name)


def reduced_in_step(tensor: DTensor, protocol: Any) -> Any:
    """Reduce a shard for pickle within a step: the full tensor, gathered once all ranks are here."""
    for traps in running.get(threading.get_ident(), [])[-1:]:
        traps.meet()
    return tensor.full_tensor().__reduce_ex__(protocol)
