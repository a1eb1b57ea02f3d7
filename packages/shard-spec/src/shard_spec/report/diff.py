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
    before, after = plan.document(), other.document()
    settings = tuple(
        Change(key, json.dumps(before[key]), json.dumps(after[key]))
        for key in ("mesh", "strict", "output_plan", "return_local_tensor")
        if before[key] != after[key]
    )
    old_rules, new_rules = dict(before["rules"]), dict(after["rules"])
    rules = []
    for key in sorted({*old_rules, *new_rules}):
        sides = (each.get(key) for each in (old_rules, new_rules))
        old, new = (side if side is None or isinstance(side, str) else json.dumps(side) for side in sides)
        if old != new:
            rules.append(Change(key, old, new))
    if module is None:
        return PlanDiff(settings, tuple(rules))
    resolutions = resolve(plan, module), resolve(other, module)
    tensors = []
    same: dict[Any, bool] = {}  # layers share it
    for tensor in resolutions[0].metadata.tensors:
        first, second = (each.layouts.get(tensor.name) for each in resolutions)
        key = (first, second, tensor.shape)
        if key not in same:  # None: a Sharder's
            both = first is not None and second is not None
            same[key] = first.equivalent_to(second, tensor.shape) if both else first is second  # type: ignore[union-attr, arg-type]  # `both` says neither is None
        if not same[key]:
            tensors.append(Change(tensor.name, *(str(layout) if layout else None for layout in (first, second))))
    sizes = [max(memory_of(each, optimizer="none").parts["parameters"], default=0) for each in resolutions]
    return PlanDiff(settings, tuple(rules), tuple(tensors), (sizes[0], sizes[1]))
