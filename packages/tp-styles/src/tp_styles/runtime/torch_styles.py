"""Styles that only know how they are applied: what they did is found by comparing before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles.plan.planned import PlannedModule
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.changes import ModuleChange, restore

TABLES = [key for key, value in vars(nn.Module()).items() if "hooks" in key and isinstance(value, dict)]
"""Every table of hooks of a module."""


def apply_torch_style(
    found: PlannedModule, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> list[ModuleChange]:
    """A style that only knows how it is applied: what it did is found by comparing before and after."""
    before = [
        (child, dict(child._parameters), {key: set(vars(child)[key]) for key in TABLES}, dict(vars(child)))
        for child in module.modules()
    ]
    found.style.src_data_rank = src_data_rank
    try:
        returned = found.style._apply(module, mesh)
    except BaseException:
        restore(_differences(before))
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
