"""Key of a trace: all that it depends on. Programs are found again by it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dp_partition._torch_compat import pytree
from dp_partition.capture.constants import FunctionConstants, fingerprint
from dp_partition.capture.hypers import static_signature
from dp_partition.capture.states import states_by_id
from dp_partition.capture.subject import Subject


def program_key(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], outside: FunctionConstants) -> Any:
    """Shapes, dtypes, structure, constants, modes, which state there is: hashable.

    Args:
        subject: The modules and optimizers among the arguments.
        args: The step's arguments.
        kwargs: Its keyword arguments.
        outside: What its function reads from elsewhere.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    training = tuple([module.training for module in subject.structure.modules])
    states = tuple(
        [
            _names(tuple(known.get(id(p), ())))
            for optimizer in subject.optimizers
            for known in [states_by_id(optimizer)]
            for group in optimizer.param_groups
            for p in group["params"]
        ]
    )
    trained = tuple([p.requires_grad for p in subject.params.values()])
    signature = static_signature(subject.optimizers)
    autocast = tuple(
        [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
    )
    buffers = tuple([(b.shape, b.dtype, b.stride()) for b in subject.buffers.values()])
    constants = (signature, autocast, subject.attributes(), outside.read(), buffers)
    return tuple(map(_leaf_key, leaves)), spec, training, states, trained, constants


@functools.lru_cache
def _names(keys: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(sorted(map(str, keys)))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, nn.Module | Optimizer):
        return id(leaf)
    if hasattr(leaf, "__dict__") and not callable(leaf):
        return fingerprint(leaf)  # not by identity: its attributes change, and ids come again
    try:
        hash(leaf)
    except TypeError:
        return fingerprint(leaf)
    return type(leaf), leaf


__all__ = ["program_key"]
