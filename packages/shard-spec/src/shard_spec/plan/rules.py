"""Rules: the items of a plan, each read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.values import PlanValue, is_sharder, is_spec, to_layout


@dataclass(frozen=True, eq=False)
class Rule:
    """One item of a plan.

    Attributes:
        key: The pattern as it was written.
        pattern: The pattern, or None where it cannot be read.
        value: What was written on the right.
        kind: ``"layout"``, ``"spec"``, ``"sharder"`` or ``"wrong"``.
        layout: The layout, where the kind is ``"layout"``.
        problems: Why it cannot be used.
    """

    key: str
    pattern: Pattern | None
    value: PlanValue
    kind: str
    layout: Layout | None = None
    problems: tuple[Problem, ...] = ()


def read_rules(plan: Mapping[str, PlanValue], mesh: MeshSpec | None) -> tuple[Rule, ...]:
    """Read every item of ``plan``; a wrong one becomes a rule that says why."""
    layouts: dict[str, Layout] = {}  # many rules of one plan say the same text
    return tuple(_read_rule(key, value, mesh, layouts) for key, value in plan.items())


def _read_rule(key: Any, value: PlanValue, mesh: MeshSpec | None, layouts: dict[str, Layout]) -> Rule:
    name = key if isinstance(key, str) else repr(key)
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
    if is_spec(value) or is_sharder(value):
        kind = "spec" if is_spec(value) else "sharder"
        return Rule(name, pattern, value, kind, None, tuple(problems))
    layout = None
    try:
        layout = layouts.get(value) if isinstance(value, str) else None
        layout = to_layout(value, mesh) if layout is None else layout
        if isinstance(value, str):
            layouts[value] = layout
        if mesh is not None and layout.mesh != mesh:
            problems.append(_other_mesh(name, layout.mesh, mesh))
    except PlanError as error:
        problems.extend(replace(problem, name=_joined(name, problem.name)) for problem in error.problems)
    return Rule(name, pattern, value, "layout" if layout else "wrong", layout, tuple(problems))


def _joined(rule: str, argument: str) -> str:
    return f"{rule} ({argument})" if argument else rule


def _other_mesh(name: str, found: MeshSpec, mesh: MeshSpec) -> Problem:
    return Problem(
        "mesh-mismatch",
        name,
        found=f"its layout is on {found!r}, the plan on {mesh!r}",
        hint="make the layout on the plan's mesh, or leave the plan's mesh out",
    )
