"""Bytes that optimizers keep for each parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from shard_spec._shared.problems import PlanError, Problem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerState:
    """State that an optimizer keeps for each parameter with a gradient.

    Attributes:
        name: What reports call it.
        slots: Number of tensors as large as the (local) parameter.
        scalar_bytes: Bytes beside them for each parameter: torch counts steps in a float32 scalar. It lies on the CPU
            unless the optimizer is ``fused`` or ``capturable``; it is counted all the same.
        dtype: Dtype of the slots; None means that of the parameter (of the master copy where there is one).
        master: Dtype of a second, finer copy of each floating parameter that the optimizer updates; None for none.
    """

    name: str
    slots: int = 0
    scalar_bytes: int = 0
    dtype: str | None = None
    master: str | None = None


OptimizerLike: TypeAlias = "str | OptimizerState | torch.optim.Optimizer | type[torch.optim.Optimizer] | None"

# Read off torch.optim 2.13: state tensors of the default arguments.
OPTIMIZERS = {
    "none": OptimizerState("none"),
    "sgd": OptimizerState("sgd"),
    "momentum": OptimizerState("momentum", slots=1),
    "adam": OptimizerState("adam", slots=2, scalar_bytes=4),
    "adamw": OptimizerState("adamw", slots=2, scalar_bytes=4),
    "amsgrad": OptimizerState("amsgrad", slots=3, scalar_bytes=4),
    "adamax": OptimizerState("adamax", slots=2, scalar_bytes=4),
    "adagrad": OptimizerState("adagrad", slots=1, scalar_bytes=4),
    "rmsprop": OptimizerState("rmsprop", slots=1, scalar_bytes=4),
    "adadelta": OptimizerState("adadelta", slots=2, scalar_bytes=4),
    "mixed-sgd": OptimizerState("mixed-sgd", master="float32"),
    "mixed-momentum": OptimizerState("mixed-momentum", slots=1, master="float32"),
    "mixed-adam": OptimizerState("mixed-adam", slots=2, scalar_bytes=4, master="float32"),
    "mixed-adamw": OptimizerState("mixed-adamw", slots=2, scalar_bytes=4, master="float32"),
}


def optimizer_state(optimizer: OptimizerLike) -> OptimizerState:
    """Return the state of ``optimizer``: by name, as stated, or from a torch optimizer's class and settings.

    Raises:
        PlanError: ``invalid-argument``, with the names that are known.
    """
    if isinstance(optimizer, OptimizerState):
        return optimizer
    if optimizer is None:
        return OPTIMIZERS["none"]
    if isinstance(optimizer, str):
        found = OPTIMIZERS.get(optimizer.lower())
    else:
        found = _from_torch(optimizer)
    if found is None:
        raise PlanError(
            Problem(
                "invalid-argument",
                "optimizer",
                found=repr(optimizer)[:200],
                hint=f"one of {', '.join(OPTIMIZERS)}, or OptimizerState(name, slots, scalar_bytes)",
            )
        )
    return found


def _from_torch(optimizer: object) -> OptimizerState | None:
    import torch

    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"]:
        return None  # a subclass may keep anything
    found = OPTIMIZERS.get(kind.__name__.lower())
    if found is None or not isinstance(optimizer, torch.optim.Optimizer):
        return found
    extra = 0
    settings = optimizer.defaults
    if found.name == "sgd" and settings.get("momentum"):
        return OPTIMIZERS["momentum"]
    if found.name in ("adam", "adamw") and settings.get("amsgrad"):
        extra += 1
    if found.name == "rmsprop":
        extra += bool(settings.get("momentum")) + bool(settings.get("centered"))
    return replace(found, slots=found.slots + extra)
