"""Plans as YAML, for people to write and review; the content is that of the JSON form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shard_spec.plan.serialize import document_of, from_document
from shard_spec.plan.strangers import yaml_values
from shard_spec._shared.problems import PlanError, Problem

if TYPE_CHECKING:
    from shard_spec.plan.sharding_plan import ShardingPlan


def to_yaml(plan: ShardingPlan) -> str:
    """The plan as YAML; equal plans give equal bytes.

    Needs no YAML library: every value is written as JSON, which is YAML.

    Raises:
        PlanError: As ``to_json``.
    """
    document = document_of(plan)
    lines = [f"{key}: {json.dumps(document[key])}" for key in ("format", "version")]
    mesh = document["mesh"]
    if mesh is None:
        lines.append("mesh: null")
    else:
        lines.append("mesh:")
        lines += [f"  axes: {json.dumps(mesh['axes'])}", f"  ranks: {json.dumps(mesh['ranks'])}"]
        lines.append(f"  ranks_per_host: {json.dumps(mesh['ranks_per_host'])}")
    lines.append(f"strict: {json.dumps(document['strict'])}")
    for key in ("rules", "output_plan"):
        if not document[key]:
            lines.append(f"{key}: {'null' if document[key] is None else '{}'}")
        else:
            lines.append(f"{key}:")
            lines += [f"  {json.dumps(pattern)}: {json.dumps(value)}" for pattern, value in document[key]]
    lines.append(f"return_local_tensor: {json.dumps(document['return_local_tensor'])}")
    return "\n".join(lines) + "\n"


def from_yaml(text: str | bytes) -> ShardingPlan:
    """Read YAML that :func:`to_yaml` or a person wrote, up to 1 MiB of it; needs ``shard-spec[yaml]``.

    Axes may also be written as a mapping, ``mesh: {axes: {dp: 2, tp: 4}}``, and keys that are null left out. Values are
    those of JSON (``on``, ``010`` and dates are text); a key that stands twice, an alias or a tag is refused.

    Raises:
        PlanError: ``bad-plan-file``, or as ``from_json``.
        ModuleNotFoundError: Without PyYAML.
    """
    try:
        document = yaml_values(text)
    except ValueError as error:
        raise _bad(f"not YAML: {str(error)[:200]}") from None
    return from_document(_as_json_document(document))


def _as_json_document(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    found = {"mesh": None, "strict": False, "output_plan": None, "return_local_tensor": None, **document}
    for key in ("rules", "output_plan"):
        if isinstance(found.get(key), dict):
            found[key] = [[pattern, value] for pattern, value in found[key].items()]
    mesh = found["mesh"]
    if isinstance(mesh, dict):
        mesh = {"ranks": None, "ranks_per_host": None, **mesh}
        if isinstance(mesh.get("axes"), dict):
            mesh["axes"] = [[axis, size] for axis, size in mesh["axes"].items()]
        found["mesh"] = mesh
    return found


def _bad(found: str) -> PlanError:
    return PlanError(Problem("bad-plan-file", found=found, hint="see ShardingPlan.to_yaml for what a plan looks like"))
