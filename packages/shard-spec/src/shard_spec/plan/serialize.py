"""Plans as JSON: one form for one content, and a format number.

The document, one rule a line, rules sorted by pattern::

    {"format": "shard-spec/plan", "version": 1,
     "mesh": {"axes": [["dp", 2], ["tp", 4]], "ranks": null},
     "strict": false,
     "rules": [["layers.*.attn.wq.weight", "dp:R, tp:S(0)"], ...],
     "output_plan": null, "return_local_tensor": null, "axis_roles": [["dp", "data"], ["tp", "model"]]}

A plan without roles of axes has no key ``axis_roles``.

A value is the text of a layout on the plan's mesh, or ``{"layout": text, "mesh": mesh}`` for one on another mesh.
Specs have no file form: their layouts depend on shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import placement_spec
from shard_spec.layout.text import parse_placement
from shard_spec.plan.values import PlanValue, as_placements, is_sharder, is_spec
from shard_spec.specs.base import as_spec

FORMAT = "shard-spec/plan"
VERSION = 1


def dump(document: Mapping[str, Any]) -> str:
    """Format JSON with one rule a line, for readable diffs in version control."""
    lines = []  # json.dumps alone has one line or too many
    for key, value in document.items():
        if key in ("rules", "output_plan") and value:
            text = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def items(table: Mapping[str, PlanValue], mesh: MeshSpec | None, problems: list[Problem]) -> list[list[Any]]:
    """Return the rules of a table, sorted; a rule without a file form is added to ``problems``."""
    return [[key, _value_document(key, table[key], mesh, problems)] for key in sorted(table, key=str)]


def mesh_document(mesh: MeshSpec) -> dict[str, Any]:
    """Return a mesh as values."""
    axes = [[name, size] for name, size in mesh.axes.items()]
    ranks = None if mesh.rank_list is None else list(mesh.rank_list)
    return {"axes": axes, "ranks": ranks}


def _value_document(key: Any, value: PlanValue, mesh: MeshSpec | None, problems: list[Problem]) -> Any:
    if not isinstance(key, str):
        problems.append(
            Problem("invalid-plan", repr(key), found=f"a key of type {type(key).__qualname__}", hint="use text")
        )
        key = repr(key)  # goes on, to report all problems
    if isinstance(value, Layout):  # the mesh is stored if it is not the plan's
        return str(value) if value.mesh == mesh else {"layout": str(value), "mesh": mesh_document(value.mesh)}
    if is_spec(value) or is_sharder(value):  # what stands for them is for the digest alone
        value = as_spec(value) or value
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if is_sharder(value):
            problems.append(
                Problem(
                    "invalid-plan",
                    key,
                    found=f"a Sharder of type {name}",
                    hint="a Sharder is code: keep it in code, and write the other rules",
                )
            )
            return {"sharder": name}
        problems.append(
            Problem(
                "invalid-plan",
                key,
                found=f"a spec of type {name}",
                hint="write the layouts it stands for: ShardingPlan.from_layouts(plan.resolve(model))",
            )
        )
        return {"spec": name, "repr": "" if " at 0x" in repr(value) else repr(value)}
    try:
        if mesh is not None:
            return str(Layout(mesh, as_placements(value)))
        if isinstance(value, str):
            return value  # its axes depend on the mesh
        named = value.items() if isinstance(value, Mapping) else (("", each) for each in as_placements(value))
        specs = [(axis, parse_placement(p) if isinstance(p, str) else placement_spec(p)) for axis, p in named]
        return ", ".join(f"{axis}:{spec}" if axis else str(spec) for axis, spec in specs)
    except (PlanError, TypeError) as error:
        problems.append(
            Problem("invalid-plan", key, found=f"{value!r:.200}: {error}", hint="correct the rule; see plan.problems")
        )
        return {"wrong": repr(value)}  # for the digest only
