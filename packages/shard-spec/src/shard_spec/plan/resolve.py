"""Resolve a plan: the deciding rule and the layout of each tensor; validate it: every problem, in one pass."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.content import Rule
from shard_spec.plan.globs import glob_rules
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata, metadata_of
from shard_spec.plan.values import is_spec, to_layout
from shard_spec.specs.base import ShardingSpec, from_torch

if TYPE_CHECKING:
    from torch import nn

    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.metadata import ModelMetadata


@dataclass(frozen=True, eq=False)
class Resolution(Mapping[str, Layout]):
    """Layout of every tensor of one model, by FQN; tied tensors answer to each name.

    Attributes:
        metadata: The model.
        layouts: First FQN of each tensor to its layout; without the tensors of Sharders.
        rule_of: First FQN of each tensor to the deciding pattern, ``""`` if there is none.
        matched: First FQN of each tensor to all matching patterns.
        sharders: FQN of each module with a Sharder.
        mesh: The mesh of tensors without a rule.
        problems: Problems found by ``examine``; ``resolve`` raises them.
    """

    metadata: ModelMetadata
    layouts: dict[str, Layout]
    rule_of: dict[str, str]
    matched: dict[str, tuple[str, ...]]
    sharders: dict[str, Any]
    mesh: MeshSpec | None
    problems: tuple[Problem, ...] = ()
    _tensors: dict[str, TensorMetadata] = field(default_factory=dict)  # by each of its names

    def __getitem__(self, name: str) -> Layout:
        return self.layouts[self._tensors[name].name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of FQNs of one tensor."""
        return tuple(tensor.aliases for tensor in self.metadata.tensors if len(tensor.aliases) > 1)

    @property
    def parameters(self) -> dict[str, Layout]:
        """Layouts of the parameters."""
        return {t.name: self.layouts[t.name] for t in self.metadata.parameters if t.name in self.layouts}

    @property
    def buffers(self) -> dict[str, Layout]:
        """Layouts of the buffers."""
        return {t.name: self.layouts[t.name] for t in self.metadata.buffers if t.name in self.layouts}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the layouts' meshes, ascending."""
        meshes = {layout.mesh for layout in self.layouts.values()}
        return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))

    @property
    def one_mesh(self) -> MeshSpec:
        """The mesh of all layouts.

        Raises:
            PlanError: ``mesh-mismatch`` if there are several.
        """
        meshes = {layout.mesh for layout in self.layouts.values()} or {self.mesh} - {None}
        if len(meshes) != 1:
            reason = f"{len(meshes)} meshes in one plan"
            raise PlanError(Problem("mesh-mismatch", found=reason, hint="put all layouts on one mesh"))
        (mesh,) = meshes
        assert mesh is not None
        return mesh

    def tensor(self, name: str) -> TensorMetadata:
        """Return the metadata of the tensor called ``name`` (any of its names)."""
        return self._tensors[name]


def resolve(plan: PlanContent, module: nn.Module | ModelMetadata) -> Resolution:
    """Return the layout of every tensor of ``module``.

    Raises:
        PlanError: With every problem.
    """
    resolution = examine(plan, module)
    raise_problems(resolution.problems, f"the plan does not fit the model: {len(resolution.problems)} problem(s)")
    return resolution


def examine(plan: PlanContent, module: nn.Module | ModelMetadata) -> Resolution:
    """Resolve as far as possible and collect every problem."""
    metadata = metadata_of(module)
    problems = list(metadata.problems)  # lazy parameters, for example
    problems += [problem for rule in plan.rules for problem in rule.problems]
    names = {alias for tensor in metadata.tensors for alias in tensor.aliases}  # a name overrides its glob letters
    usable = [_as_name(rule) if rule.key in names else rule for rule in plan.rules if rule.pattern is not None]
    sharders = _place_sharders([rule for rule in usable if rule.kind == "sharder"], metadata, problems)
    index = _RuleIndex([rule for rule in usable if rule.kind != "sharder"])
    chosen_layouts = _Layouts(problems)
    decided: dict[str, tuple[Rule | None, Layout | None]] = {}
    matched: dict[str, tuple[str, ...]] = {}
    for tensor in metadata.tensors:
        by_alias = {alias: index.matching(alias, tensor.kind) for alias in tensor.aliases}
        rules = {alias: alias_rule for alias, alias_rule in by_alias.items() if alias_rule}
        matched[tensor.name] = tuple(dict.fromkeys(rule.key for group in rules.values() for rule in group))
        if _taken_by_sharder(tensor, rules, sharders, problems):
            continue  # its layout is the Sharder's business
        decided[tensor.name] = _decide(tensor, rules, chosen_layouts, plan.strict, problems)
    problems += [_matches_nothing(rule.key, metadata) for rule in index.rules if rule.key not in index.used]
    mesh = plan.mesh or _common_mesh(layout for _, layout in decided.values())
    default = None if mesh is None else Layout.replicated(mesh)  # tensors without a rule replicate
    if default is None and not problems and any(rule is None for rule, _ in decided.values()):
        hint = "pass mesh= to the plan: there are tensors that no rule mentions"
        problems.append(Problem("missing-mesh", found="neither the plan nor a rule names ranks", hint=hint))
    layouts = {}
    for name, (rule, layout) in decided.items():
        chosen = default if rule is None else layout
        if chosen is not None:
            layouts[name] = chosen
    return Resolution(
        metadata=metadata,
        layouts=layouts,
        rule_of={name: rule.key if rule else "" for name, (rule, _) in decided.items()},
        matched=matched,
        sharders=sharders,
        mesh=mesh,
        problems=tuple(problems),
        _tensors={alias: tensor for tensor in metadata.tensors for alias in tensor.aliases},
    )


class _Name(Pattern):
    """Full name of a tensor with glob letters in it (``nn.ModuleDict`` takes any key)."""

    is_exact, names_buffers = True, True

    def __post_init__(self) -> None:
        """Skip parsing: the key is a name."""


def _as_name(rule: Rule) -> Rule:
    assert rule.pattern is not None
    return rule if rule.pattern.is_exact else replace(rule, pattern=_Name(rule.key))


class _RuleIndex:
    """Index of rules: exact ones by name, others in a list, with a record of used rules."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.exact = {rule.key: rule for rule in rules if rule.pattern is not None and rule.pattern.is_exact}
        self.wild = [rule for rule in rules if rule.pattern is not None and not rule.pattern.is_exact]
        self.used: set[str] = set()

    def matching(self, name: str, kind: str) -> list[Rule]:
        """Return the rules that match ``name``, an exact one first."""
        exact = self.exact.get(name)  # a dict lookup: most rules are exact
        matches = [exact] if exact else []
        for rule in self.wild:
            assert rule.pattern is not None
            if (kind == "parameter" or rule.pattern.names_buffers) and rule.pattern.matches(name):
                matches.append(rule)
        self.used.update(rule.key for rule in matches)
        return matches


class _Layouts:
    """Layouts of rules for tensors; each (layout, shape) is checked once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.good: set[tuple[Layout, tuple[int, ...]]] = set()

    def of(self, rule: Rule, tensor: TensorMetadata) -> Layout | None:
        """Return the layout of ``tensor`` under ``rule``; None after recording the problem."""
        layout = rule.layout
        if rule.kind == "spec":
            try:
                spec = rule.value if isinstance(rule.value, ShardingSpec) else from_torch(rule.value)
                layout = spec.to_layout(tensor.shape)
            except PlanError as error:
                self.problems.extend(replace(problem, name=tensor.name) for problem in error.problems)
                return None
        if layout is None:  # an invalid rule, recorded when it was parsed
            return None
        if (layout, tensor.shape) in self.good:
            return layout
        wrong = list(layout.problems(tensor.shape, tensor.name))
        if layout.partial:  # DTensor allows it, but a parameter has no pending sum
            reason = f"a stored {tensor.kind} with the layout {layout}"
            hint = "partial values come out of computations; replicate or shard what is stored"
            axis = next(iter(layout.partial))
            wrong.append(Problem("partial-value", tensor.name, axis=axis, found=reason, hint=hint))
        self.problems.extend(wrong)
        if wrong:
            return None
        self.good.add((layout, tensor.shape))
        return layout


def _decide(
    tensor: TensorMetadata, rules: dict[str, list[Rule]], checked: _Layouts, strict: bool, problems: list[Problem]
) -> tuple[Rule | None, Layout | None]:
    """Return the deciding rule of ``tensor`` and its layout; (None, None) without a rule."""
    if not rules:
        if strict and tensor.kind == "parameter":
            text, hint = "no rule mentions it, and the plan is strict", "add a rule; 'R' replicates it"
            problems.append(Problem("unmatched-pattern", tensor.name, found=text, hint=hint))
        return None, None
    winners = {alias: _deciding(alias, found, problems) for alias, found in rules.items()}
    # An exact rule for one name of a tied tensor overrides globs for its other names.
    winners = {alias: rule for alias, rule in winners.items() if _is_exact(rule)} or winners
    layouts = {alias: checked.of(rule, tensor) for alias, rule in winners.items()}
    first = next(iter(winners))
    for alias, layout in layouts.items():
        both = layout is not None and layouts[first] is not None
        if both and layout != layouts[first] and not layout.equivalent_to(layouts[first], tensor.shape):  # type: ignore[union-attr, arg-type]  # `both` says neither is None
            found = f"{first} -> {layouts[first]} by rule {winners[first].key!r}, but {alias} -> {layout}"
            hint = "these names are one tensor: give both the same layout, or only one of them a rule"
            problems.append(Problem("tied-weights", alias, found=f"{found} by rule {winners[alias].key!r}", hint=hint))
    return winners[first], layouts[first]  # equal for all names, or a problem


def _deciding(name: str, rules: list[Rule], problems: list[Problem]) -> Rule:
    """Return the deciding rule: the exact one, or globs that agree."""
    if not _is_exact(rules[0]) and any(not _same_value(rule, rules[0]) for rule in rules):
        reason = "matched by " + " and ".join(repr(rule.key) for rule in rules) + ", which differ"
        hint = "add an exact rule for this name, or narrow one of the globs"
        problems.append(Problem("ambiguous-pattern", name, found=reason, hint=hint))
    return rules[0]


def _is_exact(rule: Rule) -> bool:
    return rule.pattern is not None and rule.pattern.is_exact


def _same_value(rule: Rule, other: Rule) -> bool:
    if rule.layout is not None or other.layout is not None:
        return rule.layout == other.layout
    return rule.value is other.value or bool(rule.value == other.value)  # specs may have costly equality


def _matches_nothing(key: str, metadata: ModelMetadata) -> Problem:
    if key in metadata.modules:
        hint = f"that is a module; write {key + '.**' if key else '**'!r} for all of its parameters"
    else:
        names = [alias for tensor in metadata.tensors for alias in tensor.aliases]
        close = difflib.get_close_matches(key, names[:5000], n=1)  # quadratic: bounded
        hint = f"did you mean {close[0]!r}?" if close else "remove the rule or correct the pattern"
    return Problem("unmatched-pattern", key, found="no parameter or buffer has a name like this", hint=hint)


def _place_sharders(rules: list[Rule], metadata: ModelMetadata, problems: list[Problem]) -> dict[str, Any]:
    """Return FQN of module -> Sharder, for every Sharder at a valid place."""
    placed: dict[str, Any] = {}
    for rule in rules:
        assert rule.pattern is not None
        paths = [path for path in metadata.modules if rule.pattern.matches(path)]
        if rule.key == "" or "" in paths:
            hint = "name a submodule; the root cannot be replaced in place"
            problems.append(Problem("sharder-nesting", rule.key, found="a Sharder for the root module", hint=hint))
        elif not paths:  # Sharders need a module
            hint = "name a submodule's FQN"
            problems.append(Problem("unknown-name", rule.key, found="no module for this Sharder", hint=hint))
        for path in paths:
            if path and path in placed:
                reason = "two Sharders match this module"
                problems.append(Problem("ambiguous-pattern", path, found=reason, hint="keep one of them"))
            elif path:
                placed[path] = rule.value
    for path in placed:
        outer = next((other for other in placed if path.startswith(other + ".")), None)
        if outer is not None:
            reason = f"a Sharder inside of {outer!r}, which has a Sharder itself"
            problems.append(Problem("sharder-nesting", path, found=reason, hint="keep one of them"))
    return placed


def _taken_by_sharder(
    tensor: TensorMetadata, rules: dict[str, list[Rule]], sharders: dict[str, Any], problems: list[Problem]
) -> bool:
    if not sharders:  # most plans
        return False
    owners = {alias: next((p for p in sharders if alias.startswith(p + ".")), None) for alias in tensor.aliases}
    if not any(owners.values()):
        return False
    if len(set(owners.values())) > 1:  # half of a tied tensor would be replaced
        text = f"tied as {', '.join(tensor.aliases)}, of which a Sharder takes only some"
        hint = "untie it, or give the Sharder a module that holds all of its names"
        problems.append(Problem("tied-weights", tensor.name, found=text, hint=hint))
    for alias, rule in rules.items():
        if owners[alias] is not None and _is_exact(rule[0]):
            text = f"module {owners[alias]!r} has a Sharder, which decides about this tensor"
            problems.append(Problem("ambiguous-pattern", alias, found=text, hint="remove one of the two rules"))
    return True


def _common_mesh(layouts: Iterable[Layout | None]) -> MeshSpec | None:
    """Return the mesh for tensors without a rule: the others' mesh, or all their ranks on one axis."""
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts if layout is not None))
    if len(meshes) <= 1:
        return meshes[0] if meshes else None
    ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
    return MeshSpec({"ranks": len(ranks)}, ranks)


def compact_rules(found: Resolution, mesh: MeshSpec | None) -> tuple[dict[str, Any], MeshSpec | None]:
    """Return equivalent rules with globs for the model of ``found``, and their mesh."""
    tensors = [tensor for tensor in found.metadata.tensors if tensor.name in found.layouts]
    stored = {
        tensor.name: found.layouts[tensor.name]
        for tensor in tensors
        if tensor.kind == "parameter" or not found.layouts[tensor.name].is_replicated  # buffers replicate by default
    }
    meshes = {layout.mesh for layout in stored.values()}
    mesh = mesh or (next(iter(meshes)) if len(meshes) == 1 else None)
    values = {name: str(layout) if layout.mesh == mesh else layout for name, layout in stored.items()}
    parameters = {tensor.name: values.pop(tensor.name) for tensor in tensors if tensor.kind == "parameter"}
    aliases = {alias for tensor in tensors if tensor.kind == "parameter" for alias in tensor.aliases} - set(parameters)
    names = {alias for tensor in found.metadata.tensors for alias in tensor.aliases}
    rules = glob_rules(parameters, aliases, names - aliases - set(parameters))
    return {**rules, **values, **found.sharders}, mesh


def validate(
    plan: PlanContent, module: nn.Module | ModelMetadata, *, world_size: int | None = None
) -> tuple[Problem, ...]:
    """Return every problem of ``plan`` for ``module``; see ``ShardingPlan.validate``."""
    resolution = examine(plan, module)
    problems = plan_problems(plan, resolution)
    if world_size is not None and resolution.ranks and resolution.ranks[-1] >= world_size:
        text = f"the plan names ranks up to {resolution.ranks[-1]}, there are {world_size} ranks"
        problems.append(Problem("mesh-too-large", found=text, hint="start more processes or use a smaller mesh"))
    return tuple(dict.fromkeys(problems))  # once each, in order


def plan_problems(plan: PlanContent, resolution: Resolution) -> list[Problem]:
    """Return the problems of a plan that is resolved already."""
    outputs = [*_output_problems(plan, resolution.metadata), *_local_problems(plan, resolution.metadata)]
    return [*resolution.problems, *outputs]


def _module_not_found(argument: str, path: object) -> Problem:
    name = path if isinstance(path, str) else repr(path)
    hint = "name a module's FQN; '' is the root"
    return Problem("unknown-name", name, found=f"{argument} names no module of the model", hint=hint)


def _output_problems(plan: PlanContent, metadata: ModelMetadata) -> list[Problem]:
    problems = []
    for path, value in (plan.output_plan or {}).items():
        if metadata.modules and path not in metadata.modules:
            problems.append(_module_not_found("output_plan", path))
        if is_spec(value):
            continue  # its layout depends on the output's shape
        try:
            layout = to_layout(value, plan.mesh)
            if plan.mesh is not None and layout.mesh != plan.mesh:
                reason = f"its layout is on {layout.mesh!r}, the plan on {plan.mesh!r}"
                problems.append(Problem("mesh-mismatch", f"output_plan[{path!r}]", found=reason, hint="use one mesh"))
        except PlanError as error:
            problems += [replace(problem, name=f"output_plan[{path!r}]") for problem in error.problems]
    return problems


def _local_problems(plan: PlanContent, metadata: ModelMetadata) -> list[Problem]:
    names = plan.return_local_tensor or ()
    problems = []
    if metadata.modules:
        problems += [_module_not_found("return_local_tensor", name) for name in names if name not in metadata.modules]
    for name, count in Counter(names).items():
        if count > 1:
            reason = f"return_local_tensor names it {count} times"
            problems.append(Problem("duplicate-name", name, found=reason, hint="name it once"))
    return problems
