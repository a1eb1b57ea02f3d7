"""Read untrusted plan files as arguments of a plan: checked at each step, nothing executed or imported."""

from __future__ import annotations

from typing import Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.text import layout_items, parse_placement
from shard_spec.plan.axis_roles import role_problems
from shard_spec.plan.serialize import FORMAT, VERSION
from shard_spec.plan.untrusted_input import json_values

MAX_RULES = 1_000_000
_KEYS = {"format", "version", "mesh", "strict", "rules", "output_plan", "return_local_tensor"}


def from_json(text: str | bytes) -> dict[str, Any]:
    """Read the output of `to_json` as data: nothing is executed or imported by name.

    All else raises ``invalid-plan``. Rules that do not match the model are accepted; ``validate`` lists them.
    """
    try:
        document = json_values(text)
    except ValueError as error:
        raise _bad(f"not JSON: {str(error)[:200]}") from None
    return from_document(document)


def from_dict(document: Any) -> dict[str, Any]:
    """Read the document of `to_json` as values, also in handwritten form; see ``ShardingPlan.from_dict``."""
    if not isinstance(document, dict):
        return from_document(document)
    full = {"mesh": None, "strict": False, "output_plan": None, "return_local_tensor": None, **document}
    if isinstance(full["mesh"], dict):
        full["mesh"] = {"ranks": None, **full["mesh"]}
    tables = (full, "rules"), (full, "output_plan"), (full, "axis_roles"), (full["mesh"], "axes")
    for table, key in tables:
        if isinstance(table, dict) and isinstance(table.get(key), dict):  # the JSON form is a list of pairs
            table[key] = [[name, value] for name, value in table[key].items()]
    return from_document(full)


def from_document(document: Any) -> dict[str, Any]:
    """Read a document made of plain JSON types."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(f"no object with 'format': '{FORMAT}'")
    version = document.get("version")
    if type(version) is not int or version != VERSION:  # True equals 1, but is no version
        raise PlanError(
            Problem(
                "invalid-plan",
                found=f"format version {version!r:.60}, this release reads {VERSION}",
                hint="install the release of shard-spec that wrote the file, or write it again",
            )
        )
    if set(document) - {"axis_roles"} != _KEYS:  # unknown keys may change the meaning
        odd = sorted((set(document) - {"axis_roles"}) ^ _KEYS)
        raise _bad(f"unknown or missing keys: {', '.join(map(repr, odd))[:300]}")
    mesh = _read_mesh(document["mesh"])
    strict, output, local = document["strict"], document["output_plan"], document["return_local_tensor"]
    if not isinstance(strict, bool):
        raise _bad("'strict' is neither true nor false")  # bool() would accept any text
    if local is not None and not (isinstance(local, list) and all(isinstance(name, str) for name in local)):
        raise _bad("'return_local_tensor' is no list of names")
    rules = _read_items("rules", document["rules"])
    outputs = None if output is None else _read_items("output_plan", output)
    # Text that is no layout on any mesh is refused. ``validate`` checks it against this mesh and a model.
    problems: list[Problem] = []
    items = {**rules, **(outputs or {})}.items()
    for text, name in {value: name for name, value in items if isinstance(value, str)}.items():
        try:
            for _, placement in layout_items(text):
                parse_placement(placement)
        except PlanError as error:
            problems += [Problem("invalid-plan", name, found=each.found, hint=each.hint) for each in error.problems]
    raise_problems(problems, "the file holds layouts that cannot be read")
    roles = document.get("axis_roles", [])
    pairs = isinstance(roles, list) and all(isinstance(item, list) and len(item) == 2 for item in roles)
    if not pairs or not all(isinstance(text, str) for item in roles for text in item):
        raise _bad(f"'axis_roles' is no list of [axis, role]: {str(roles)[:100]}")
    if len(roles) != len({axis for axis, _ in roles}):
        raise _bad("'axis_roles' names an axis twice")
    raise_problems(role_problems(dict(roles), mesh), "the file holds roles that cannot be read")
    content = {"plan": rules, "output_plan": outputs, "return_local_tensor": local}
    return {**content, "mesh": mesh, "strict": strict, "axis_roles": dict(roles)}


def _read_items(name: str, items: Any) -> dict[str, Any]:
    if not isinstance(items, list) or len(items) > MAX_RULES:
        raise _bad(f"'{name}' is no list, or longer than {MAX_RULES}")
    table: dict[str, Any] = {}
    for item in items:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)) or item[0] in table:
            raise _bad(f"'{name}' holds {str(item)[:100]}, which is not [pattern, value], or is a duplicate")
        table[item[0]] = value = item[1]
        if isinstance(value, dict) and set(value) == {"layout", "mesh"} and isinstance(value["layout"], str):
            mesh = _read_mesh(value["mesh"])
            value = table[item[0]] = None if mesh is None else Layout(mesh, value["layout"])
        if not isinstance(value, str | Layout):
            raise _bad(f"the value {str(item[1])[:100]} is neither text nor a layout")
    return table


def _read_mesh(value: Any) -> MeshSpec | None:
    if value is None:
        return None
    good = isinstance(value, dict) and set(value) == {"axes", "ranks"} and isinstance(value["axes"], list)
    ranks = value["ranks"] if good else None
    numbers = isinstance(ranks, list) and all(type(each) is int for each in ranks)  # type(): no booleans
    if not good or not (ranks is None or numbers):
        raise _bad(f"the mesh {str(value)[:100]}")
    axes: dict[str, int] = {}
    for item in value["axes"]:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)) or item[0] in axes:
            raise _bad(f"the mesh axis {str(item)[:100]}")
        axes[item[0]] = item[1]
    return MeshSpec(axes, ranks)


def _bad(found: str) -> PlanError:
    return PlanError(Problem("invalid-plan", found=found, hint="this reads what ShardingPlan.to_json wrote"))
