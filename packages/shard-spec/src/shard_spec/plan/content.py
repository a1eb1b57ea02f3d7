"""PlanContent: the data of a sharding plan with its digest and JSON, base of `ShardingPlan`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec, as_mesh
from shard_spec.plan.axis_roles import role_problems
from shard_spec.plan.read import from_dict, from_json
from shard_spec.plan.serialize import FORMAT, VERSION, dump, items, mesh_document
from shard_spec.plan.values import PlanValue, is_sharder, is_spec, to_layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        for problem in error.problems:
            problems.append(replace(problem, name=f"{name} ({problem.name})" if problem.name else name))
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
        mesh: MeshSpec | Mapping[str, int] | str | DeviceMesh | None = None,
        strict: bool = False,
        axis_roles: Mapping[str, str] | None = None,
    ) -> None:
        tables = ("plan", plan, "pattern to layout"), ("output_plan", output_plan, "module FQN to layout")
        for name, value, content in (*tables, ("axis_roles", axis_roles, "axis to role")):
            if not isinstance(value, Mapping) and (name == "plan" or value is not None):
                raise TypeError(f"ShardingPlan: {name} is a mapping from {content}, not {type(value).__qualname__}")
        if isinstance(return_local_tensor, str):  # tuple() would split it into letters
            raise TypeError(f"return_local_tensor is a list of module FQNs, not the text {return_local_tensor!r}")
        object.__setattr__(self, "plan", MappingProxyType(dict(plan)))
        output = None if output_plan is None else MappingProxyType(dict(output_plan))
        object.__setattr__(self, "output_plan", output)
        local = None if return_local_tensor is None else tuple(return_local_tensor)
        object.__setattr__(self, "return_local_tensor", local)
        object.__setattr__(self, "mesh", as_mesh(mesh))  # frozen dataclass
        object.__setattr__(self, "strict", bool(strict))
        object.__setattr__(self, "axis_roles", MappingProxyType(dict(sorted((axis_roles or {}).items()))))

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
        """Parse the output of :meth:`to_json`; safe on untrusted files.

        Raises:
            PlanError: ``invalid-plan``.
        """
        return cls(**from_json(text))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Parse the document of :meth:`to_json` as values, for example ``yaml.safe_load(text)``.

        Rules and axes may be mappings; null keys may be left out.

        Raises:
            PlanError: ``invalid-plan``.
        """
        return cls(**from_dict(document))

    def on_mesh(self, mesh: MeshSpec) -> Self:
        """Return the same rules on another mesh."""
        other = copy.copy(self)
        object.__setattr__(other, "mesh", mesh)  # frozen dataclass; the copy has parsed no rule yet
        return other
