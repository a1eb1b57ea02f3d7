"""Hyperparameters as inputs: what an optimizer reads from ``param_groups`` stays live in the graph.

Every float of a parameter group becomes a symbol while the step is traced. Arithmetic on it is recorded with exactly
the operations eager mode uses, so results are the same bit for bit; a condition on it (``if weight_decay != 0``)
becomes a guard that is checked when the value changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

FUSED_ARGUMENTS = ("lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay")


@dataclass(frozen=True)
class Hyper:
    """One live float: ``optimizers[optimizer].param_groups[group][key]``, or its element ``index`` (betas)."""

    optimizer: int
    group: int
    key: str
    index: int | None = None

    @property
    def label(self) -> str:
        """Name of the graph input."""
        tail = "" if self.index is None else str(self.index)
        return f"optim{self.optimizer}_group{self.group}_{self.key}{tail}"

    def read(self, optimizers: list[Optimizer]) -> float:
        """The value now."""
        value = optimizers[self.optimizer].param_groups[self.group][self.key]
        return float(value if self.index is None else value[self.index])


def find_hypers(optimizers: list[Optimizer]) -> list[Hyper]:
    """Every float (and every float of a tuple) in the parameter groups."""
    found = []
    for number, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for key, index, value in _scalars(group):
                if is_live(key, value):
                    found.append(Hyper(number, group_index, key, index))
    return found


def is_live(key: str, value: Any) -> bool:
    """Return whether a value of a parameter group is a number (or tensor of one element) that schedulers change."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        return True
    if isinstance(value, bool) or key in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"):
        return False
    return isinstance(value, float) or (isinstance(value, int) and key in ("lr", "weight_decay", "momentum", "eps"))


def static_signature(optimizers: list[Optimizer]) -> tuple[Any, ...]:
    """Return all that a trace depends on besides live floats: flags, names, hooks, and parameters of each group."""
    parts: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            frozen = tuple(
                (key, index, _signature_of(value))
                for key, index, value in _scalars(group)
                if not is_live(key, value)
                and key not in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
            )
            parts.append((type(optimizer).__qualname__, tuple(map(id, group["params"])), frozen))
        parts.append(_own(optimizer))
    return tuple(parts)


def _own(optimizer: Optimizer) -> tuple[Any, ...]:
    """Hooks, and attributes of an optimizer class of one's own. Private ones torch's schedulers write at every step."""
    plain = [(k, v) for k, v in vars(optimizer).items() if k[0] != "_" and isinstance(v, bool | int | float | str)]
    hooks = [
        (id(hook), hook)
        for table in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        for hook in table.values()
    ]
    return tuple(plain), tuple(hooks)


def _signature_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _scalars(group: dict[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    for key in sorted(group):
        if key in ("params", "param_names"):
            continue
        value = group[key]
        if isinstance(value, tuple | list):
            for index, element in enumerate(value):
                yield key, index, element
        else:
            yield key, None, value
