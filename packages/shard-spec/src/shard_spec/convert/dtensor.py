"""DTensor placements of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.convert.refuse import not_expressible, sharder_problems
from shard_spec.distributed.parameter_format import dtensor_placement, dtensor_specs
from shard_spec.layout.layout import Layout
from shard_spec.plan.resolve import resolve

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.metadata import ModelMetadata


def to_dtensor_placements(
    plan: PlanContent, module: nn.Module | ModelMetadata | None = None
) -> dict[str, tuple[Placement, ...]]:
    """Placements for each rule, or with ``module`` for each tensor; see ``ShardingPlan.to_dtensor_placements``."""
    problems: list[Problem] = []
    found: dict[str, tuple[Placement, ...]] = {}
    if module is None:
        problems += plan.problems
        for rule in plan.rules:
            if rule.layout is not None:
                found[rule.key] = _said(rule.key, rule.layout, None, problems)
            elif not rule.problems:
                hint = "pass the model: placements of specs depend on shapes"
                problems.append(not_expressible(rule.key, f"a {rule.kind}, not placements", hint))
    else:
        resolved = resolve(plan, module)
        problems += sharder_problems(resolved, "a DTensor")
        for tensor in resolved.metadata.tensors:
            layout = resolved.layouts.get(tensor.name)
            if layout is not None:
                found[tensor.name] = _said(tensor.name, layout, tensor.shape, problems)
    raise_problems(problems, "DTensor placements cannot say this plan")
    return found


def _said(name: str, layout: Layout, shape: tuple[int, ...] | None, problems: list[Problem]) -> tuple[Placement, ...]:
    specs, why = dtensor_specs(layout, shape)
    if why is not None:
        hint = "shard-reshard moves tensors in any layout; plan.apply keeps fused weights as local parameters"
        problems.append(not_expressible(name, f"{layout}: {why}", hint))
        return ()
    return tuple(dtensor_placement(spec) for spec in specs)
