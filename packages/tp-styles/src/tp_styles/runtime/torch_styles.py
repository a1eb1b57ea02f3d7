"""Styles that only know how they are applied: what they did is found by comparing before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles.plan.planned import PlannedModule
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.changes import ModuleChange, restore

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def apply_torch_style(
    found: PlannedModule, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> list[ModuleChange]:
    """A style that only knows how it is applied: what it did is found by comparing before and after."""
    before = [(child, dict(child._parameters), _hooks(child), dict(vars(child))) for child in module.modules()]
    found.style.src_data_rank = src_data_rank
    try:
        returned = found.style._apply(module, mesh)
    except BaseException:
        restore(_differences(before))
        raise
    changes = _differences(before)
    if returned is not module:
        restore(changes)
        raise PlanError(
            Problem(
                "model-changed",
                found.name,
                found=f"{found.style!r} returned another module",
                hint="a style works on the module it is given",
            )
        )
    return changes


_Before = list[tuple[nn.Module, dict[str, Any], dict[str, set[int]], dict[str, Any]]]


def _differences(before: _Before) -> list[ModuleChange]:
    changes = []
    for child, parameters, hooks, attributes in before:
        replaced = {key: value for key, value in parameters.items() if child._parameters.get(key) is not value}
        change = ModuleChange(child, parameters={key: value for key, value in replaced.items() if value is not None})
        change.removers += _hook_removers(child, hooks)
        change.removers += [_AttributeRemover(child, key) for key in vars(child) if key not in attributes]
        if "forward" in attributes and vars(child)["forward"] is not attributes["forward"]:
            change.attributes["forward"] = attributes["forward"]
        changes.append(change)
    return changes


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    return {table: set(getattr(module, table)) for table in _HOOK_TABLES if hasattr(module, table)}


def _hook_removers(module: nn.Module, before: dict[str, set[int]]) -> list[Callable[[], None]]:
    removers: list[Callable[[], None]] = []
    for table, keys in before.items():
        current = getattr(module, table)
        removers += [KeyRemover(current, key) for key in current if key not in keys]
    return removers


@dataclass
class KeyRemover:
    table: dict[int, Any]
    key: int

    def __call__(self) -> None:
        self.table.pop(self.key, None)


@dataclass
class _AttributeRemover:
    module: nn.Module
    name: str

    def __call__(self) -> None:
        vars(self.module).pop(self.name, None)
