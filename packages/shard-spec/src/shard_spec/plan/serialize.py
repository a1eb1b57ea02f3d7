"""Plans as JSON: one form for one content, a format number, and nothing that runs on reading.

The document, one rule a line, rules sorted by pattern::

    {"format": "shard-spec/plan", "version": 1,
     "mesh": {"axes": [["dp", 2], ["tp", 4]], "ranks": null, "ranks_per_host": null},
     "strict": false,
     "rules": [["layers.*.attn.wq.weight", "dp:R, tp:S(0)"], ...],
     "output_plan": null, "return_local_tensor": null}

A value is the text of a layout on the plan's mesh; ``{"layout": text, "mesh": mesh}`` for one on another mesh;
``{"chunk": {"dim": 0, "placements": [...]}}`` or ``{"enumerable": [[offsets, sizes, placement], ...]}`` for a spec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_spec.layout import Layout
from shard_spec.mesh import MeshSpec
from shard_spec.placements import to_term
from shard_spec.plan.strangers import json_values
from shard_spec.plan.values import PlanValue, as_placements, is_sharder, is_spec
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.text import format_term

if TYPE_CHECKING:
    from shard_spec.plan.sharding_plan import ShardingPlan

FORMAT = "shard-spec/plan"
VERSION = 1
MAX_RULES = 1_000_000
_KEYS = {"format", "version", "mesh", "strict", "rules", "output_plan", "return_local_tensor"}


def to_json(plan: ShardingPlan) -> str:
    """The plan as JSON; equal plans give equal bytes.

    Raises:
        PlanError: ``not-serializable`` for each rule that a file cannot hold (a Sharder, a user's own spec).
    """
    return dump(document_of(plan))


def document_of(plan: ShardingPlan) -> dict[str, Any]:
    """The document of a plan, made of plain JSON types."""
    problems: list[Problem] = []
    document = _document(plan, problems)
    raise_problems(problems, "the plan cannot be written")
    return document


def digest_text(plan: ShardingPlan) -> str:
    """What a plan's digest is taken of: its document; what a file cannot hold counts by its class."""
    return dump(_document(plan, []))


def _document(plan: ShardingPlan, problems: list[Problem]) -> dict[str, Any]:
    output = plan.output_plan
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": None if plan.mesh is None else _mesh_document(plan.mesh),
        "strict": plan.strict,
        "rules": _items(plan.plan, plan.mesh, problems),
        "output_plan": None if output is None else _items(output, plan.mesh, problems),
        "return_local_tensor": None if plan.return_local_tensor is None else list(plan.return_local_tensor),
    }


def dump(document: Mapping[str, Any]) -> str:
    """JSON with one rule a line, so that a version control system shows changed rules as changed lines."""
    lines = []
    for key, value in document.items():
        if key in ("rules", "output_plan") and value:
            text = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _items(table: Mapping[str, PlanValue], mesh: MeshSpec | None, problems: list[Problem]) -> list[list[Any]]:
    return [[key, _value_document(str(key), table[key], mesh, problems)] for key in sorted(table, key=str)]


def _mesh_document(mesh: MeshSpec) -> dict[str, Any]:
    axes = [[name, size] for name, size in mesh.axes.items()]
    ranks = None if mesh.rank_list is None else list(mesh.rank_list)
    return {"axes": axes, "ranks": ranks, "ranks_per_host": mesh.ranks_per_host}


def _value_document(key: str, value: PlanValue, mesh: MeshSpec | None, problems: list[Problem]) -> Any:
    if isinstance(value, Layout):
        return str(value) if value.mesh == mesh else {"layout": str(value), "mesh": _mesh_document(value.mesh)}
    if is_spec(value):
        return _spec_document(key, value, problems)
    if is_sharder(value):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        hint = "a Sharder is code: keep it in code, and write the other rules"
        problems.append(Problem("not-serializable", key, found=f"a Sharder of type {name}", hint=hint))
        return {"sharder": name}
    try:
        return _layout_text(value, mesh)
    except (PlanError, TypeError) as error:
        found = f"{value!r:.200}: {error}"
        problems.append(Problem("not-serializable", key, found=found, hint="correct the rule; see plan.problems"))
        return {"wrong": repr(value)}


def _layout_text(value: Any, mesh: MeshSpec | None) -> str:
    if mesh is not None:
        return str(Layout(mesh, as_placements(value)))
    if isinstance(value, str):
        return value  # which axes it means is known with the mesh
    if isinstance(value, Mapping):
        return ", ".join(f"{axis}:{format_term(to_term(placement))}" for axis, placement in value.items())
    return ", ".join(format_term(to_term(placement)) for placement in as_placements(value))


def _spec_document(key: str, value: Any, problems: list[Problem]) -> Any:
    from shard_spec.specs.base import ShardingSpec
    from shard_spec.specs.chunk import ChunkShardingSpec
    from shard_spec.specs.enumerable import EnumerableShardingSpec
    from shard_spec.specs.torch_specs import from_torch

    spec = value if isinstance(value, ShardingSpec) else from_torch(value)
    if type(spec) is ChunkShardingSpec:
        return {"chunk": {"dim": spec.dim, "placements": [str(device) for device in spec.placements]}}
    if type(spec) is EnumerableShardingSpec:
        return {
            "enumerable": [
                [list(s.shard_offsets), list(s.shard_sizes), None if s.placement is None else str(s.placement)]
                for s in spec.shards
            ]
        }
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    problems.append(
        Problem(
            "not-serializable",
            key,
            found=f"a spec of the user-defined type {name}",
            hint="write the layouts it stands for: ShardingPlan.from_resolution(plan.resolve(model))",
        )
    )
    return {"spec": name, "repr": "" if " at 0x" in repr(value) else repr(value)}


# ---- reading ------------------------------------------------------------------------------------------------------


def from_json(text: str | bytes) -> ShardingPlan:
    """Read what :func:`to_json` wrote. Reads data only; runs nothing, imports nothing by name.

    Raises:
        PlanError: ``bad-plan-file`` for anything else, ``unknown-version`` for a newer format. Wrong rules inside of a
            well-formed file are read, and listed by ``validate``.
    """
    try:
        document = json_values(text)
    except ValueError as error:
        raise _bad(f"not JSON: {str(error)[:200]}") from None
    return from_document(document)


def from_document(document: Any) -> ShardingPlan:
    """Read a document made of plain JSON types."""
    from shard_spec.plan.sharding_plan import ShardingPlan

    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(f"no object with 'format': '{FORMAT}'")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise PlanError(
            Problem(
                "unknown-version",
                found=f"format version {version!r:.60}, this release reads {VERSION}",
                hint="install the release of shard-spec that wrote the file, or write it again",
            )
        )
    if set(document) != _KEYS:
        odd = sorted(set(document) ^ _KEYS)
        raise _bad(f"unknown or missing keys: {', '.join(map(repr, odd))[:300]}")
    mesh = _read_mesh(document["mesh"])
    strict, output, local = document["strict"], document["output_plan"], document["return_local_tensor"]
    if not isinstance(strict, bool):
        raise _bad("'strict' is neither true nor false")
    if local is not None and not (isinstance(local, list) and all(isinstance(name, str) for name in local)):
        raise _bad("'return_local_tensor' is no list of names")
    rules = _read_items("rules", document["rules"])
    return ShardingPlan(
        rules, None if output is None else _read_items("output_plan", output), local, mesh=mesh, strict=strict
    )


def _read_items(name: str, items: Any) -> dict[str, Any]:
    if not isinstance(items, list) or len(items) > MAX_RULES:
        raise _bad(f"'{name}' is no list, or longer than {MAX_RULES}")
    table: dict[str, Any] = {}
    for item in items:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)) or item[0] in table:
            raise _bad(f"'{name}' holds {str(item)[:100]}, which is no [pattern, value] or stands there twice")
        table[item[0]] = _read_value(item[1])
    return table


def _read_value(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"layout", "mesh"} and isinstance(value["layout"], str):
        mesh = _read_mesh(value["mesh"])
        if mesh is not None:
            return Layout.parse(value["layout"], mesh)
    if isinstance(value, dict) and len(value) == 1:
        if "chunk" in value:
            return _read_chunk(value["chunk"])
        if "enumerable" in value:
            return _read_enumerable(value["enumerable"])
    raise _bad(f"the value {str(value)[:100]} is neither text nor a layout nor a spec")


def _read_chunk(value: Any) -> Any:
    from shard_spec.specs.chunk import ChunkShardingSpec

    good = isinstance(value, dict) and set(value) == {"dim", "placements"} and type(value["dim"]) is int
    if not good or not _texts(value["placements"]):
        raise _bad(f"the chunk spec {str(value)[:100]}")
    return ChunkShardingSpec(value["dim"], value["placements"])


def _read_enumerable(value: Any) -> Any:
    from shard_spec.specs.enumerable import EnumerableShardingSpec
    from shard_spec.specs.shards import ShardMetadata

    shards = []
    items: list[Any] = value if isinstance(value, list) else [None]
    for item in items:
        good = isinstance(item, list) and len(item) == 3 and _numbers(item[0]) and _numbers(item[1])
        if not good or not (item[2] is None or isinstance(item[2], str)):
            raise _bad(f"the shard {str(item)[:100]} of an enumerable spec")
        shards.append(ShardMetadata(*item))
    return EnumerableShardingSpec(shards)


def _read_mesh(value: Any) -> MeshSpec | None:
    if value is None:
        return None
    good = isinstance(value, dict) and set(value) == {"axes", "ranks", "ranks_per_host"}
    good = good and isinstance(value["axes"], list) and (value["ranks"] is None or _numbers(value["ranks"]))
    good = good and (value["ranks_per_host"] is None or type(value["ranks_per_host"]) is int)
    if not good:
        raise _bad(f"the mesh {str(value)[:100]}")
    axes: dict[str, int] = {}
    for item in value["axes"]:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)) or item[0] in axes:
            raise _bad(f"the mesh axis {str(item)[:100]}")
        axes[item[0]] = item[1]
    return MeshSpec(axes, value["ranks"], value["ranks_per_host"])


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _bad(found: str) -> PlanError:
    return PlanError(
        Problem("bad-plan-file", found=found, hint="this reads what ShardingPlan.to_json or to_yaml wrote")
    )
