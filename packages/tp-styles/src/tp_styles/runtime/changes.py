"""What was done to modules, so that it can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tp_styles.split import Split


@dataclass
class ModuleChange:
    """What was done to one module, so that it can be taken back."""

    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
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
