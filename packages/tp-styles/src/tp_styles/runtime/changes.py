"""Changes of modules, and their way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tp_styles._shared.stale_parameters import is_stale, mark_stale
from tp_styles.problems import Problem
from tp_styles.values.split import Split


@dataclass
class ModuleChange:
    """Changes of one module, and their way back.

    Attributes:
        module: The module.
        parameters: What stood in the places that other parameters took, until all is done.
        replaced: The names of these places, once all is done.
        splits: How what stands there now is divided.
        attributes: What plain attributes were.
        removers: Take back hooks and forwards.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    removers: list[Callable[[], None]] = field(default_factory=list)


def take_back(changes: list[ModuleChange]) -> None:
    """Forwards, hooks and attributes as they were."""
    for change in reversed(changes):
        for remove in reversed(change.removers):
            remove()
        for name, value in change.attributes.items():
            setattr(change.module, name, value)


def restore(changes: list[ModuleChange]) -> None:
    """Put everything back as it was, the parameters too."""
    for change in changes:
        change.module._parameters.update(change.parameters)
    take_back(changes)


def settle(model: nn.Module, changes: list[ModuleChange]) -> None:
    """All is done: the whole parameters are let go, and whoever still trains one is told."""
    names = {module: name for name, module in model.named_modules()}
    found = "an optimizer, or another module, still holds the full parameter; the module trains its shard"
    hint = "build the optimizer after the plan is applied; apply it to a module that holds all ties"
    for change in changes:
        path = names.get(change.module, "")
        for name, original in change.parameters.items():
            if not is_stale(original):
                fqn = f"{path}.{name}" if path else name
                problem = Problem("parameter-replaced", fqn, found=found, hint=hint)
                mark_stale(original, problem, change.module._parameters.get(name))
        change.replaced = tuple(change.parameters)
        change.parameters.clear()
