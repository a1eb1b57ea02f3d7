"""Plans as YAML, for people to write and review; the content is that of the JSON form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shard_spec.plan.serialize import MAX_BYTES, document_of, from_document
from shard_spec.problems import PlanError, Problem

if TYPE_CHECKING:
    from shard_spec.plan.sharding_plan import ShardingPlan

_MAX_DEPTH = 12


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


def from_yaml(text: str) -> ShardingPlan:
    """Read YAML that :func:`to_yaml` or a person wrote; needs ``shard-spec[yaml]``.

    Axes may also be written as a mapping, ``mesh: {axes: {dp: 2, tp: 4}}``, and keys that are null left out. Aliases
    and tags are refused: a plan needs neither, and they are how a small file becomes a large one.

    Raises:
        PlanError: ``bad-plan-file``, or as ``from_json``.
        ModuleNotFoundError: Without PyYAML.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading YAML needs PyYAML: pip install 'shard-spec[yaml]'") from error
    if len(text) > MAX_BYTES:
        raise _bad(f"{len(text)} characters, more than {MAX_BYTES}")
    try:
        _refuse_tricks(yaml, text)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise _bad(f"not YAML: {str(error)[:200]}") from None
    return from_document(_as_json_document(document))


def _refuse_tricks(yaml: Any, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise _bad("it has an anchor, an alias or a tag")
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise _bad(f"nested deeper than {_MAX_DEPTH}")


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
