"""Content of a plan: its rules with their values, its digest, and its JSON.

JSON of untrusted input is bounded in size and depth, with unique keys and plain values. A file with two values under
one key is refused: the intended one is unknown.

A plan as JSON has one form for one content, and a format number. The document, one rule a line, rules sorted by
pattern::

    {"format": "shard-spec/plan", "version": 1,
     "mesh": {"axes": [["dp", 2], ["tp", 4]], "ranks": null},
     "strict": false,
     "rules": [["layers.*.attn.wq.weight", "dp:R, tp:S(0)"], ...],
     "output_plan": null, "return_local_tensor": null, "axis_roles": [["dp", "data"], ["tp", "model"]]}

A plan without roles of axes has no key ``axis_roles``.

A value is the text of a layout on the plan's mesh, or ``{"layout": text, "mesh": mesh}`` for one on another mesh.
Specs have no file form: their layouts depend on shapes.

Untrusted plan files are read as arguments of a plan: checked at each step, nothing executed or imported.

`PlanContent` has the data of a sharding plan with its digest and JSON; `ShardingPlan` is its subclass. `glob_rules`
writes compact rules for layouts given by name.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout import (
    Layout,
    MeshLike,
    MeshSpec,
    PlacementLike,
    SpecialShard,
    as_mesh,
    layout_items,
    parse_placement,
    placement_spec,
    role_problems,
)
from shard_spec.specs import Sharder, ShardingSpec, as_spec

MAX_BYTES = 64 * 2**20


def json_values(text: str | bytes, *, floats: bool = False) -> Any:
    """Return the values of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        floats: True to accept fractions. NaN and Infinity are never accepted; they are not JSON.

    Raises:
        ValueError: It is too long, nested too deep, not JSON, or has a key twice in one object.
    """
    if len(text) > MAX_BYTES:  # before any parsing
        raise ValueError(f"{len(text)} characters, more than {MAX_BYTES}")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    fraction = float if floats else _no_constant  # no fraction in a plan
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=fraction)
    except RecursionError:  # json recurses once per level
        raise ValueError("nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):  # a duplicate overwrote a value
        raise ValueError("a key appears twice in one object")
    return mapping


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text[:40]} has no place in it")


LayoutLike: TypeAlias = "Layout | str | PlacementLike | Sequence[PlacementLike] | Mapping[str, PlacementLike]"
PlanValue: TypeAlias = "LayoutLike | ShardingSpec | Sharder | Any"


def is_spec(value: object) -> bool:
    """Return True if ``value`` is a sharding spec: ours, a user's subclass, or one of torch's own."""
    return not isinstance(value, type) and callable(getattr(value, "build_metadata", None))


def is_sharder(value: object) -> bool:
    """Return True if ``value`` is a Sharder: it shards a full module by itself."""
    plain = isinstance(value, Layout | str | Mapping | Sequence)
    return not plain and not isinstance(value, type) and not is_spec(value) and callable(getattr(value, "shard", None))


def is_placement(value: object) -> bool:
    """Return True if ``value`` is a single placement."""
    if isinstance(value, SpecialShard):
        return True
    types = sys.modules.get("torch.distributed.tensor.placement_types")
    return types is not None and isinstance(value, types.Placement)


def as_placements(value: Any) -> Any:
    """Convert ``value`` to the form of ``Layout``: a single placement is that of the only axis."""
    return [value] if is_placement(value) else value


def to_layout(value: PlanValue, mesh: MeshSpec | None) -> Layout:
    """Return the layout of ``value`` on ``mesh``; not for specs and Sharders.

    Raises:
        PlanError: ``missing-mesh`` if it needs a mesh and there is none; problems of :class:`Layout`; ``wrong-type``.
    """
    if isinstance(value, Layout):
        return value
    if not (
        is_placement(value) or isinstance(value, str | Mapping | Sequence)
    ):  # before the mesh: the type is the first error
        raise PlanError(
            Problem(
                "wrong-type",
                found=f"{value!r:.200} of type {type(value).__qualname__}",
                hint="give placements, a Layout, text such as 'dp:R, tp:S(0)', a ShardingSpec or a Sharder",
            )
        )
    if mesh is None:  # placements alone have no axes
        raise PlanError(
            Problem(
                "missing-mesh", found=f"{value!r:.200}", hint="pass mesh= to the plan, or a Layout that has its own"
            )
        )
    return Layout(mesh, as_placements(value))


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
    return {"axes": axes, "ranks": (None if mesh.rank_list is None else list(mesh.rank_list))}


def _value_document(key: Any, value: PlanValue, mesh: MeshSpec | None, problems: list[Problem]) -> Any:
    if not isinstance(key, str):
        key, kind = repr(key), type(key).__qualname__  # goes on, to report all problems
        problems.append(Problem("invalid-plan", key, found=f"a key of type {kind}", hint="use text"))
    if isinstance(value, Layout):  # the mesh is stored if it is not the plan's
        return str(value) if value.mesh == mesh else {"layout": str(value), "mesh": mesh_document(value.mesh)}
    if is_spec(value) or is_sharder(value):  # what stands for them is for the digest alone
        value = as_spec(value) or value
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        kind, hint = "spec", "write the layouts it stands for: ShardingPlan.from_layouts(plan.resolve(model))"
        if is_sharder(value):
            kind, hint = "Sharder", "a Sharder is code: keep it in code, and write the other rules"
        problems.append(Problem("invalid-plan", key, found=f"a {kind} of type {name}", hint=hint))
        shown = "" if " at 0x" in repr(value) else repr(value)
        return {"sharder": name} if is_sharder(value) else {"spec": name, "repr": shown}
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


MAX_RULES = 1_000_000
_KEYS = {"format", "version", "mesh", "strict", "rules", "output_plan", "return_local_tensor"}


def from_document(document: Any) -> dict[str, Any]:
    """Read a document made of plain JSON types."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(f"no object with 'format': '{FORMAT}'")
    version = document.get("version")
    if type(version) is not int or version != VERSION:  # True equals 1, but is no version
        text = f"format version {version!r:.60}, this release reads {VERSION}"
        hint = "install the release of shard-spec that wrote the file, or write it again"
        raise PlanError(Problem("invalid-plan", found=text, hint=hint))
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
    names = {value: name for name, value in {**rules, **(outputs or {})}.items() if isinstance(value, str)}
    for text, name in names.items():
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
    content = {"plan": rules, "output_plan": outputs, "return_local_tensor": local, "mesh": mesh, "strict": strict}
    return {**content, "axis_roles": dict(roles)}


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


@dataclass(frozen=True, eq=False)
class Rule:
    """One item of a plan."""

    key: str  # the pattern as written
    pattern: Pattern | None  # None if it cannot be parsed
    value: PlanValue  # the right side as written
    kind: str  # "layout", "spec", "sharder" or "wrong"
    layout: Layout | None = None  # if the kind is "layout"
    problems: tuple[Problem, ...] = ()  # reasons against the rule
    is_exact: bool = False  # True if the key is a full name


def _read_rule(key: Any, value: PlanValue, mesh: MeshSpec | None, layouts: dict[str, Layout]) -> Rule:
    name = key if isinstance(key, str) else repr(key)  # keys from files may be of any type
    problems: list[Problem] = []
    pattern = None
    if not isinstance(key, str):
        problems.append(
            Problem("invalid-argument", name, found=f"a key of type {type(key).__qualname__}", hint="use text")
        )
    else:
        try:
            pattern = Pattern(key)
        except PlanError as error:
            problems.extend(error.problems)
    is_exact = pattern is not None and pattern.is_exact
    if is_spec(value) or is_sharder(value):  # their layouts need shapes
        kind = "spec" if is_spec(value) else "sharder"
        return Rule(name, pattern, value, kind, None, tuple(problems), is_exact)
    layout = None
    try:
        layout = layouts.get(value) if isinstance(value, str) else None
        layout = to_layout(value, mesh) if layout is None else layout
        if isinstance(value, str):
            layouts[value] = layout  # parsed once per text
        if mesh is not None and layout.mesh != mesh:
            problems.append(
                Problem(
                    "mesh-mismatch",
                    name,
                    found=f"its layout is on {layout.mesh!r}, the plan on {mesh!r}",
                    hint="make the layout on the plan's mesh, or leave the plan's mesh out",
                )
            )
    except PlanError as error:
        problems += [
            replace(problem, name=f"{name} ({problem.name})" if problem.name else name) for problem in error.problems
        ]
    return Rule(name, pattern, value, "layout" if layout else "wrong", layout, tuple(problems), is_exact)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class PlanContent:
    """Rules, outputs, mesh, strictness and axis roles of a plan; see `ShardingPlan` for their meaning."""

    plan: Mapping[str, PlanValue]
    output_plan: Mapping[str, PlanValue] | None
    return_local_tensor: tuple[str, ...] | None
    mesh: MeshSpec | None
    strict: bool
    axis_roles: Mapping[str, str]

    def __init__(
        self,
        plan: Mapping[str, PlanValue],
        output_plan: Mapping[str, PlanValue] | None = None,
        return_local_tensor: Sequence[str] | None = None,
        *,
        mesh: MeshLike | None = None,
        strict: bool = False,
        axis_roles: Mapping[str, str] | None = None,
    ) -> None:
        tables = ("plan", plan, "pattern to layout"), ("output_plan", output_plan, "module FQN to layout")
        for name, value, content in (*tables, ("axis_roles", axis_roles, "axis to role")):
            if not isinstance(value, Mapping) and (name == "plan" or value is not None):
                raise TypeError(f"ShardingPlan: {name} is a mapping from {content}, not {type(value).__qualname__}")
        if isinstance(return_local_tensor, str):  # tuple() would split it into letters
            raise TypeError(f"return_local_tensor is a list of module FQNs, not the text {return_local_tensor!r}")
        vars(self).update(  # frozen dataclass
            plan=MappingProxyType(dict(plan)),
            output_plan=None if output_plan is None else MappingProxyType(dict(output_plan)),
            return_local_tensor=None if return_local_tensor is None else tuple(return_local_tensor),
            mesh=as_mesh(mesh),
            strict=bool(strict),
            axis_roles=MappingProxyType(dict(sorted((axis_roles or {}).items()))),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanContent):
            return NotImplemented
        if self.document() != other.document():  # canonical form: rules sorted, layouts as text
            return False
        # Sharders are code; the digest covers their class only.
        return all(bool(value == other.plan[key]) for key, value in self.plan.items() if is_sharder(value))

    __hash__ = None  # type: ignore[assignment]  # specs and Sharders need not be hashable; use `digest`

    def __repr__(self) -> str:
        plain = {key: str(v) if isinstance(v, Layout) and v.mesh == self.mesh else v for key, v in self.plan.items()}
        parts = [repr(plain)]
        for name in ("output_plan", "return_local_tensor", "mesh", "strict", "axis_roles"):
            value = getattr(self, name)
            if value is not None and value is not False and value != {}:
                parts.append(f"{name}={dict(value) if isinstance(value, Mapping) else value!r}")
        return f"ShardingPlan({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        names = ("plan", "output_plan", "return_local_tensor", "mesh", "strict", "axis_roles")
        values = ((name, getattr(self, name)) for name in names)
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("plan", "output_plan", "axis_roles")
        tables = {name: MappingProxyType(value) for name, value in state.items() if name in names and value is not None}
        self.__dict__.update(state | tables)

    # ---- reading ----------------------------------------------------------------------------------------------

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Rules of ``plan``, each parsed on its own. One that cannot be parsed carries its problems."""
        layouts: dict[str, Layout] = {}  # many rules share one text
        return tuple(_read_rule(key, value, self.mesh, layouts) for key, value in self.plan.items())

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of the rules and of the axes' roles that do not need a model."""
        of_rules = (problem for rule in self.rules for problem in rule.problems)
        return (*of_rules, *role_problems(self.axis_roles, self.mesh))

    def document(self, problems: list[Problem] | None = None) -> dict[str, Any]:
        """Return this plan as values; a rule without a file form stands as its class, and is added to ``problems``."""
        problems = [] if problems is None else problems
        local = self.return_local_tensor
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "mesh": None if self.mesh is None else mesh_document(self.mesh),
            "strict": self.strict,
            "rules": items(self.plan, self.mesh, problems),
            "output_plan": None if self.output_plan is None else items(self.output_plan, self.mesh, problems),
            "return_local_tensor": None if local is None else list(local),
        }
        return document | ({"axis_roles": [list(item) for item in self.axis_roles.items()]} if self.axis_roles else {})

    @property
    def digest(self) -> str:
        """Hash of the content, equal in every process. Specs count by their shards, Sharders by their class."""
        return hashlib.sha256(dump(self.document()).encode()).hexdigest()

    def to_json(self) -> str:
        """Return this plan as JSON; equal plans give equal bytes.

        Raises:
            PlanError: ``invalid-plan`` for each rule without a file form.
        """
        problems: list[Problem] = []  # all of them in one error
        document = self.document(problems)
        raise_problems(problems, "the plan cannot be written")
        return dump(document)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the output of :meth:`to_json`; safe on untrusted files: nothing is executed or imported by name.

        Rules that do not match the model are accepted; ``validate`` lists them.

        Raises:
            PlanError: ``invalid-plan``.
        """
        try:
            document = json_values(text)
        except ValueError as error:
            raise _bad(f"not JSON: {str(error)[:200]}") from None
        return cls(**from_document(document))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Parse the document of :meth:`to_json` as values, for example ``yaml.safe_load(text)``.

        Rules and axes may be mappings; null keys may be left out.

        Raises:
            PlanError: ``invalid-plan``.
        """
        if not isinstance(document, dict):
            return cls(**from_document(document))
        full = {"mesh": None, "strict": False, "output_plan": None, "return_local_tensor": None, **document}
        if isinstance(full["mesh"], dict):
            full["mesh"] = {"ranks": None, **full["mesh"]}
        for table, key in (full, "rules"), (full, "output_plan"), (full, "axis_roles"), (full["mesh"], "axes"):
            if isinstance(table, dict) and isinstance(table.get(key), dict):  # the JSON form is a list of pairs
                table[key] = [[name, value] for name, value in table[key].items()]
        return cls(**from_document(full))

    def on_mesh(self, mesh: MeshSpec) -> Self:
        """Return the same rules on another mesh."""
        other = copy.copy(self)
        object.__setattr__(other, "mesh", mesh)  # frozen dataclass; the copy has parsed no rule yet
        return other


T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a numeric path component
_GLOB_LETTERS = re.compile(r"[*?\[{]")


def glob_rules(values: Mapping[str, T | None], aliases: Collection[str], others: Collection[str]) -> dict[str, T]:
    """Return rules that give each name its value, and names without a value no rule.

    Numbers in a path become ``*`` if every parameter with such a path has the same value. Other names are listed, also
    those with a pattern that would match another tensor (``layers.*`` and ``layers.norm``). ``aliases`` are further
    names of tied parameters, ``others`` names that no pattern may match.
    """
    groups: dict[str, list[str]] = {}
    for name in values:
        groups.setdefault(pattern_of(name), []).append(name)
    stems = {*groups, *map(pattern_of, aliases)}  # globs match tied names too
    rules: dict[str, T] = {}
    for pattern, members in groups.items():
        alone = {stem for stem in stems if _glob_matches(pattern, stem)} == {pattern}
        alone = alone and not any(_glob_matches(pattern, name) for name in others)
        alone = alone and not any(map(_GLOB_LETTERS.search, members))  # a key of nn.ModuleDict may hold glob letters
        listed = {name: value for name in members if (value := values[name]) is not None}
        rules.update(_rules_of_group(pattern, members, values) if alone and len(members) > 1 else listed)
    return rules


def _glob_matches(pattern: str, stem: str) -> bool:
    mine, theirs = pattern.split("."), stem.split(".")
    return len(mine) == len(theirs) and all(own in ("*", other) for own, other in zip(mine, theirs, strict=True))


def _rules_of_group(pattern: str, members: list[str], values: Mapping[str, T | None]) -> dict[str, T]:
    """Return rules for all names of `pattern`: one if their values are equal, else few."""
    listed = {name: value for name in members if (value := values[name]) is not None}
    layout_values = list(listed.values())
    is_complete = len(listed) == len(members)
    if not listed or (is_complete and len(set(layout_values)) == 1):
        return {pattern: layout_values[0]} if listed else {}
    # One number written out (``layers.*.mlp.2.weight``), if that separates the values: exact, and readable.
    num_numbers = len(_NUMBER.findall(members[0]))  # equal in all: one pattern
    best: dict[str, T] | None = None
    for position in range(num_numbers if num_numbers > 1 else 0):
        parts: dict[str, set[T | None]] = {}
        for name in members:
            parts.setdefault(_pattern_but_one(name, position), set()).add(values[name])
        if all(len(numbers) == 1 for numbers in parts.values()):
            rules = {part: text for part, (text,) in parts.items() if text is not None}
            best = rules if best is None or len(rules) < len(best) else best  # fewest rules
    if best is not None:
        return best
    if not is_complete or len(members) <= 3:  # a glob would save nothing, or match too much
        return listed
    # The most frequent value becomes the pattern; an exact name overrides it.
    usual = min(layout_values, key=lambda value: (-layout_values.count(value), str(value)))
    return {pattern: usual, **{name: value for name, value in listed.items() if value != usual}}


def _pattern_but_one(name: str, position: int) -> str:
    """Replace every number by ``*`` except the one at `position`."""
    seen = itertools.count()
    return _NUMBER.sub(lambda match: match[0] if next(seen) == position else "*", name)


def pattern_of(name: str) -> str:
    """Replace every numeric path component of `name` by ``*``."""
    return _NUMBER.sub("*", name)
