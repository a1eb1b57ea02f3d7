"""Changes of modules and their undo; those of styles with only `_apply` are found by comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._shared.stale_parameters import is_stale, mark_stale
from tp_styles.plan.planned import PlannedModule
from tp_styles.problems import PlanError, Problem
from tp_styles.values.split import Split


@dataclass
class ModuleChange:
    """Changes of one module, for undo.

    Attributes:
        module: The module.
        parameters: Replaced parameters by name, until the plan is fully applied.
        replaced: Their names, afterwards.
        splits: Splits of the new parameters.
        attributes: Former values of plain attributes.
        removers: Functions to remove hooks and forwards.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    removers: list[Callable[[], None]] = field(default_factory=list)


def take_back(changes: list[ModuleChange]) -> None:
    """Restore forwards, hooks and attributes."""
    for change in reversed(changes):  # in reverse: a later change may cover an earlier one
        for remove in reversed(change.removers):
            remove()
        for name, value in change.attributes.items():
            setattr(change.module, name, value)


def restore(changes: list[ModuleChange]) -> None:
    """Restore everything, the parameters too."""
    for change in changes:
        change.module._parameters.update(change.parameters)
    take_back(changes)


def settle(model: nn.Module, changes: list[ModuleChange]) -> None:
    """Release the full parameters and mark them stale: training one raises an error."""
    names = {module: name for name, module in model.named_modules()}
    reason = "an optimizer, or another module, still holds the full parameter; the module trains its shard"
    hint = "build the optimizer after the plan is applied; apply it to a module that holds all ties"
    for change in changes:
        path = names.get(change.module, "")
        for name, original in change.parameters.items():
            if not is_stale(original):  # a tied one is marked once
                fqn = f"{path}.{name}" if path else name
                problem = Problem("parameter-replaced", fqn, found=reason, hint=hint)
                mark_stale(original, problem, change.module._parameters.get(name))
        change.replaced = tuple(change.parameters)
        change.parameters.clear()


# ---------------------------------------------------------------------------------------------- styles of torch

TABLES = [key for key, value in vars(nn.Module()).items() if "hooks" in key and isinstance(value, dict)]
"""Every table of hooks of a module."""


def apply_torch_style(
    found: PlannedModule, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> list[ModuleChange]:
    """Apply a style with only `_apply`; find its changes by comparing before and after."""
    before = [
        (child, dict(child._parameters), {key: set(vars(child)[key]) for key in TABLES}, dict(vars(child)))
        for child in module.modules()
    ]
    found.style.src_data_rank = src_data_rank  # torch's styles read it
    try:
        returned = found.style._apply(module, mesh)
    except BaseException:
        restore(_differences(before))  # it may have stopped halfway
        raise
    changes = _differences(before)
    if returned is not module:
        restore(changes)
        hint = "a style works on the module it is given"
        raise PlanError(
            Problem("model-changed", found.name, found=f"{found.style!r} returned another module", hint=hint)
        )
    return changes


_Before = list[tuple[nn.Module, dict[str, Any], dict[str, set[int]], dict[str, Any]]]


def _differences(before: _Before) -> list[ModuleChange]:
    changes = []
    for child, parameters, hooks, attributes in before:
        replaced = {key: value for key, value in parameters.items() if child._parameters.get(key) is not value}
        change = ModuleChange(child, parameters={key: value for key, value in replaced.items() if value is not None})
        tables = [(vars(child)[table], keys) for table, keys in hooks.items()]
        change.removers += [KeyRemover(table, key) for table, keys in tables for key in table if key not in keys]
        change.removers += [KeyRemover(vars(child), key) for key in vars(child) if key not in attributes]
        if "forward" in attributes and vars(child)["forward"] is not attributes["forward"]:
            change.attributes["forward"] = attributes["forward"]
        changes.append(change)
    return changes


@dataclass
class KeyRemover:
    table: dict[Any, Any]
    key: Any

    def __call__(self) -> None:
        self.table.pop(self.key, None)
