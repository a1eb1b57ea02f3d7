"""Regions of a plan: column-wise layers up to the row-wise ones that take their shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.distributed.tensor import Partial, Shard

from tp_styles.values.spec import Redistribution, is_below

if TYPE_CHECKING:
    from tp_styles.plan.planned import PlannedModule, TPPlan

Regions = dict[str, tuple[list[str], list[str]]]
"""FQN of the innermost module around column-wise and row-wise layers -> FQNs of the former, and of the latter."""


def regions_of(plan: TPPlan) -> Regions:
    """The regions of a plan."""
    rows = [found.name for found in plan.modules if _is_row(found)]
    regions: Regions = {}
    for found in plan.modules:
        home = found.name if _is_column(found) else ""
        while home:
            home = home.rpartition(".")[0]
            if inside := [row for row in rows if is_below(row, home)]:
                regions.setdefault(home, ([], inside))[0].append(found.name)
                break
    return regions


def _is_column(found: PlannedModule) -> bool:
    """Whole input, a shard out."""
    spec = found.spec
    leaves_shard = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].dst, Shard)
    comes_whole = bool(spec.inputs) and not isinstance(spec.inputs[0][1].dst, Shard)
    return leaves_shard and comes_whole and bool(spec.parameters)


def _is_row(found: PlannedModule) -> bool:
    """A shard in, a sum out."""
    spec = found.spec
    sums = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].src, Partial)
    return sums and bool(spec.inputs) and isinstance(spec.inputs[0][1].src, Shard)


def shared_inputs(plan: TPPlan) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Yield, for each block, groups of column-wise layers that may read one tensor together, and its row-wise layers.

    They lay out their inputs alike. Row-wise layers of a block within are not the block's own.
    """
    regions, specs = regions_of(plan), {found.name: found.spec for found in plan.modules}
    for home, (columns, rows) in regions.items():
        inner = [other for other in regions if other != home and is_below(other, home)]
        own = [row for row in rows if not any(is_below(row, other) for other in inner)]
        flows: dict[Redistribution, list[str]] = {}
        for name in columns:
            flows.setdefault(specs[name].inputs[0][1], []).append(name)
        groups = [names for names in flows.values() if len(names) > 1]
        if groups and own:
            yield groups, own
