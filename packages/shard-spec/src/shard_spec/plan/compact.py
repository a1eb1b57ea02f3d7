"""Rules with globs: one rule for all layers that lie alike instead of one for each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shard_spec._shared.patterns import Pattern
from shard_spec.plan.resolve import resolve

if TYPE_CHECKING:
    from torch import nn

    from shard_spec.layout.mesh import MeshSpec
    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.metadata import ModelMetadata


def compact_rules(plan: PlanContent, module: nn.Module | ModelMetadata) -> tuple[dict[str, Any], MeshSpec | None]:
    """Return rules with globs that mean the same for ``module``, and their mesh."""
    found = resolve(plan, module)
    names = [alias for tensor in found.metadata.tensors for alias in tensor.aliases]
    groups: dict[str, list[str]] = {}
    rules = {}
    for tensor in found.metadata.tensors:
        layout = found.layouts.get(tensor.name)
        if layout is None:
            continue
        if tensor.kind == "parameter":
            stem = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", tensor.name)
            groups.setdefault(stem, []).append(tensor.name)
        elif not layout.is_replicated:
            rules[tensor.name] = layout
    for stem, members in groups.items():
        layouts = {found.layouts[name] for name in members}
        same = len(members) > 1 and len(layouts) == 1
        if same and set(filter(Pattern(stem).matches, names)) == set(members):
            rules[stem] = next(iter(layouts))
        else:
            rules.update({name: found.layouts[name] for name in members})
    meshes = {layout.mesh for layout in rules.values()}
    mesh = plan.mesh or (next(iter(meshes)) if len(meshes) == 1 else None)
    values = {key: str(layout) if layout.mesh == mesh else layout for key, layout in rules.items()}
    return {**values, **found.sharders}, mesh
