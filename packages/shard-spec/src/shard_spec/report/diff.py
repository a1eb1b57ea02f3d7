"""Differences between two plans, by rule and, with a model, by tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shard_spec._shared.page import human_bytes
from shard_spec.estimate.memory import memory_of
from shard_spec.formatting import Table
from shard_spec.plan.metadata import ModelMetadata
from shard_spec.plan.resolve import resolve
from shard_spec.plan.serialize import _document

if TYPE_CHECKING:
    from torch import nn

    from shard_spec.plan.content import PlanContent


@dataclass(frozen=True)
class Change:
    """One rule or tensor that differs; None on the side without it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class PlanDiff:
    """Changes from one plan to another.

    Attributes:
        settings: Mesh, strictness, output plan and local outputs that differ.
        rules: Added, removed or changed rules.
        tensors: Tensors of different layout (bytes on ranks, not text); None without a model.
        memory: ``(before, after)`` bytes of parameters on the fullest rank; None without a model.
    """

    settings: tuple[Change, ...]
    rules: tuple[Change, ...]
    tensors: tuple[Change, ...] | None = None
    memory: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        """Return True if anything differs: with a model a tensor or setting, without one a rule."""
        return bool(self.settings) or bool(self.rules if self.tensors is None else self.tensors)

    def to_json(self) -> str:
        """Return the differences as JSON."""
        document: dict[str, Any] = {"format": "shard-spec/diff", "version": 1}
        for name in ("settings", "rules", "tensors"):
            changes = getattr(self, name)
            document[name] = None if changes is None else [[c.name, c.before, c.after] for c in changes]
        document["memory"] = None if self.memory is None else list(self.memory)
        return json.dumps(document, indent=1, sort_keys=True)

    def __str__(self) -> str:
        lines = []
        for title, changes in (("setting", self.settings), ("rule", self.rules), ("tensor", self.tensors)):
            if changes:
                rows = [[c.name, *("-" if side is None else side for side in (c.before, c.after))] for c in changes]
                lines.append(str(Table([title, "before", "after"], rows)))
        if self.memory is not None:
            before, after = self.memory
            lines.append(f"parameters on the fullest rank: {human_bytes(before)} -> {human_bytes(after)}")
        return "\n\n".join(lines) if self or self.rules else "no difference"


def diff(plan: PlanContent, other: PlanContent, module: nn.Module | ModelMetadata | None = None) -> PlanDiff:
    """Return the changes from ``plan`` to ``other``; see ``ShardingPlan.diff``."""
    before, after = _document(plan, []), _document(other, [])
    settings = tuple(
        Change(key, json.dumps(before[key]), json.dumps(after[key]))
        for key in ("mesh", "strict", "output_plan", "return_local_tensor")
        if before[key] != after[key]
    )
    old_rules, new_rules = dict(before["rules"]), dict(after["rules"])
    texts = ((key, _text(old_rules.get(key)), _text(new_rules.get(key))) for key in sorted({*old_rules, *new_rules}))
    rules = tuple(Change(key, old, new) for key, old, new in texts if old != new)
    if module is None:
        return PlanDiff(settings, rules)
    return PlanDiff(settings, rules, *_model_changes(plan, other, module))


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _model_changes(
    plan: PlanContent, other: PlanContent, module: nn.Module | ModelMetadata
) -> tuple[tuple[Change, ...], tuple[int, int]]:
    before, after = resolve(plan, module), resolve(other, module)
    changes = []
    same: dict[Any, bool] = {}
    for tensor in before.metadata.tensors:
        old, new = before.layouts.get(tensor.name), after.layouts.get(tensor.name)
        if old is None or new is None:
            if old is not new:  # a Sharder on one side
                changes.append(Change(tensor.name, str(old) if old else None, str(new) if new else None))
            continue
        key = (old, new, tensor.shape)
        if key not in same:
            same[key] = old.equivalent_to(new, tensor.shape)  # layers share it
        if not same[key]:
            changes.append(Change(tensor.name, str(old), str(new)))
    sizes = [max(memory_of(found, optimizer="none").parts["parameters"], default=0) for found in (before, after)]
    return tuple(changes), (sizes[0], sizes[1])
