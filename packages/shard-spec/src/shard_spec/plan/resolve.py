"""Metadata of a model, read once without its tensors' data, and a plan resolved on it.

Resolving finds the deciding rule and the layout of each tensor; validating lists every problem, in one pass.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shard_spec._shared.dtypes import FLOATING, ITEM_BYTES
from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout import AxisRoles, Layout, MeshSpec, role_problems, roles_of
from shard_spec.plan.content import PlanContent, Rule, is_spec, to_layout
from shard_spec.specs import ShardingSpec, from_torch


def require_floating(*dtypes: object) -> None:
    """Refuse dtypes that a module cannot be converted to; None is no dtype."""
    kinds = [name for name in ITEM_BYTES if name in FLOATING]
    for dtype in dtypes:
        if dtype is not None and dtype not in kinds:
            raise PlanError(Problem("unsupported-dtype", "dtype", found=repr(dtype), hint=f"one of {', '.join(kinds)}"))


@dataclass(frozen=True)
class TensorMetadata:
    """One parameter or buffer of a model: its global shape and kind.

    Attributes:
        name: FQN, the first of its names if it is tied.
        shape: Global shape.
        dtype: Name of the dtype without ``torch.``.
        kind: ``"parameter"`` or ``"buffer"``.
        requires_grad: True if it gets a gradient.
        aliases: All its FQNs in the order of the modules; more than one if it is tied.
        module_type: Class name of its module, ``"Linear"`` and ``"Embedding"`` for subclasses of torch's too; ``""`` if
            unknown.
        sparse_grad: True if its gradient is sparse, as that of ``nn.Embedding(sparse=True)``: only rows looked up.
        stored_bytes: Bytes of a quantised weight, packed values and scales together; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str = "parameter"
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    module_type: str = ""
    sparse_grad: bool = False
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        vars(self).update(
            shape=tuple(int(size) for size in self.shape),
            aliases=tuple(self.aliases) or (self.name,),  # at least its own name
        )
        if self.dtype not in ITEM_BYTES:
            raise PlanError(
                Problem("unsupported-dtype", self.name, found=repr(self.dtype), hint=f"one of {', '.join(ITEM_BYTES)}")
            )

    def bytes_of(self, numel: int, dtype: str | None = None) -> int:
        """Return the bytes of ``numel`` elements.

        Args:
            numel: Number of elements, at most that of the tensor.
            dtype: Dtype of floating tensors after a conversion; a quantised weight keeps its packed form.
        """
        if self.stored_bytes is not None:
            return -(-self.stored_bytes * numel // max(self.numel, 1))
        return numel * ITEM_BYTES[dtype if dtype and self.is_floating else self.dtype]

    @property
    def is_floating(self) -> bool:
        """True if the dtype can have a gradient."""
        return self.dtype in FLOATING

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def trains(self) -> bool:
        """True for a parameter that gets a gradient and optimizer state."""
        return self.kind == "parameter" and self.requires_grad and self.is_floating


@dataclass(frozen=True)
class ModelMetadata:
    """All tensors of a model, and the types of its modules.

    Build it with :func:`metadata_of` from a module (on any device, the meta device included), or from shapes alone.

    Attributes:
        tensors: Parameters and buffers; a tied tensor occurs once.
        modules: FQN of each module to the name of its class; empty if only tensors are known.
        problems: Problems of the model itself (uninitialized parameters, ...).
    """

    tensors: tuple[TensorMetadata, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(
            tensors=tuple(self.tensors),
            modules=dict(self.modules),
        )

    @cached_property
    def parameters(self) -> tuple[TensorMetadata, ...]:
        """Parameters among the tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "parameter")

    @property
    def buffers(self) -> tuple[TensorMetadata, ...]:
        """Buffers among the tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "buffer")

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> ModelMetadata:
        """Build metadata of parameters from names and shapes only."""
        return cls(tuple(TensorMetadata(name, tuple(shape), dtype) for name, shape in shapes.items()))


def original_of(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` wrapped: its names are those of a plan. Other modules pass unchanged."""
    original = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
    return model if original is None else original


def metadata_of(model: nn.Module | ModelMetadata) -> ModelMetadata:
    """Read the metadata of ``model``; ``ModelMetadata`` is returned as it is.

    A DTensor parameter, or a local shard with ``_sharding_info``, counts with its global shape.

    Raises:
        TypeError: When ``model`` is neither.
    """
    if isinstance(model, ModelMetadata):  # read before
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"a plan is about an nn.Module or ModelMetadata, not {type(model).__qualname__}")
    if type(model).__name__ == "OptimizedModule":  # no call for other models: apply asserts its number of frames
        model = original_of(model)
    seen: dict[int, tuple[Any, str, list[str], str, bool]] = {}  # by id: tensor, kind, names, class of module, sparse
    modules: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # every name of tied modules
        modules[path] = class_name = type(module).__name__  # all aliases of a shared module
        for base in (nn.Linear, nn.Embedding):  # subclasses use their weight as torch's class does
            class_name = base.__name__ if isinstance(module, base) else class_name
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    entry = seen.setdefault(id(tensor), (tensor, kind, [], class_name, sparse))
                    entry[2].append(f"{path}.{name}" if path else name)
    metadata, problems = list[TensorMetadata](), list[Problem]()
    for tensor, kind, names, class_name, sparse in seen.values():
        if is_lazy(tensor):  # no shape yet
            hint = "run one forward pass (a lazy module learns its shapes there), then plan"
            problems.append(Problem("uninitialized-parameter", names[0], found="its shape is not known yet", hint=hint))
            continue
        shape, dtype, grad = global_shape(tensor), str(tensor.dtype).removeprefix("torch."), bool(tensor.requires_grad)
        more = class_name, sparse, getattr(tensor, "stored_bytes", None)
        metadata.append(TensorMetadata(names[0], shape, dtype, kind, grad, tuple(names), *more))
    return ModelMetadata(tuple(metadata), modules, tuple(problems))


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the global shape of a parameter that may be a local shard. A DTensor's shape is global already."""
    info = getattr(tensor, "_sharding_info", None)
    return tuple(tensor.shape if info is None else info[2])  # index: it may be a plain tuple


Checked: TypeAlias = set[tuple[Layout, tuple[int, ...]]]  # layouts that are valid for a shape


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
        plan_roles: Roles of axes known to the plan.
    """

    metadata: ModelMetadata
    layouts: dict[str, Layout]
    rule_of: dict[str, str]
    matched: dict[str, tuple[str, ...]]
    sharders: dict[str, Any]
    mesh: MeshSpec | None
    problems: tuple[Problem, ...] = ()
    plan_roles: Mapping[str, str] = field(default_factory=dict)
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
            raise PlanError(
                Problem("mesh-mismatch", found=f"{len(meshes)} meshes in one plan", hint="put all layouts on one mesh")
            )
        (mesh,) = meshes
        assert mesh is not None
        return mesh

    def axis_roles(self, data_axes: Iterable[str] | None = None) -> AxisRoles:
        """Return the role of each axis of the mesh in a step; see :func:`shard_spec.layout.mesh.roles_of`."""
        return roles_of(self.one_mesh, self.plan_roles, data_axes)

    def tensor(self, name: str) -> TensorMetadata:
        """Return the metadata of the tensor called ``name`` (any of its names)."""
        return self._tensors[name]

    def placed(self) -> Iterator[tuple[TensorMetadata, Layout]]:
        """Yield each tensor with its layout; those that a Sharder takes have none."""
        yield from ((t, self.layouts[t.name]) for t in self.metadata.tensors if t.name in self.layouts)


def resolve(plan: PlanContent, module: nn.Module | ModelMetadata) -> Resolution:
    """Return the layout of every tensor of ``module``, or raise every problem."""
    resolution = examine(plan, module)
    raise_problems(resolution.problems, f"the plan does not fit the model: {len(resolution.problems)} problem(s)")
    return resolution


def examine(plan: PlanContent, module: nn.Module | ModelMetadata) -> Resolution:
    """Resolve as far as possible and collect every problem.

    A plan of layouts keeps its last result: `validate`, `memory` and `communication` of one model resolve it once.
    """
    metadata, last = metadata_of(module), vars(plan).get("_resolution")
    if last is not None and last.metadata == metadata:
        return last  # type: ignore[no-any-return]  # a Resolution
    problems = list(metadata.problems)  # lazy parameters, for example
    problems += [problem for rule in plan.rules for problem in rule.problems]
    problems += role_problems(plan.axis_roles, plan.mesh) if plan.axis_roles else []
    tensors = {alias: tensor for tensor in metadata.tensors for alias in tensor.aliases}
    usable = [rule for rule in plan.rules if rule.pattern is not None]
    # A full name overrides the glob letters in it: `nn.ModuleDict` takes any key.
    usable = [replace(r, pattern=_Name(r.key), is_exact=True) if r.key in tensors else r for r in usable]
    placed = [rule for rule in usable if rule.kind == "sharder"]
    sharders = _place_sharders(placed, metadata, problems) if placed else {}
    rules = [rule for rule in usable if rule.kind != "sharder"]
    exact = {rule.key: rule for rule in rules if rule.is_exact}  # a dict lookup: most rules are exact
    globs = [(rule, rule.pattern) for rule in rules if rule.pattern is not None and not rule.is_exact]
    good: Checked = set()
    decided: dict[str, tuple[Rule | None, Layout | None]] = {}
    matched: dict[str, tuple[str, ...]] = {}
    for tensor in metadata.tensors:
        matching: dict[str, list[Rule]] = {}  # by alias, an exact rule first
        for alias in tensor.aliases:
            listed = [exact[alias]] if alias in exact else []
            listed += [
                rule
                for rule, pattern in globs
                if (tensor.kind == "parameter" or pattern.names_buffers) and pattern.matches(alias)
            ]
            if listed:
                matching[alias] = listed
        matched[tensor.name] = tuple(dict.fromkeys(rule.key for listed in matching.values() for rule in listed))
        if sharders and _taken_by_sharder(tensor, matching, sharders, problems):
            continue  # its layout is the Sharder's business
        decided[tensor.name] = _decide(tensor, matching, good, plan.strict, problems)
    used = set().union(*matched.values())
    unused = [rule.key for rule in rules if rule.key not in used]
    if len(unused) > 1 and len(unused) == len(rules) and metadata.tensors and not sharders:
        problems.append(
            Problem(
                "model-mismatch",
                unused[0],
                found=(
                    f"none of the {len(unused)} rules names a tensor of this model, whose first is "
                    f"{metadata.tensors[0].name!r}"
                ),
                hint="pass the model of the plan, or correct the prefix of its names",
            )
        )
        unused = []
    for key in unused:
        if key in metadata.modules:
            hint = f"that is a module; write {key + '.**' if key else '**'!r} for all of its parameters"
        else:
            close = difflib.get_close_matches(key, list(tensors)[:5000], n=1)  # quadratic: bounded
            hint = f"did you mean {close[0]!r}?" if close else "remove the rule or correct the pattern"
        problems.append(
            Problem("unmatched-pattern", key, found="no parameter or buffer has a name like this", hint=hint)
        )
    # Tensors without a rule replicate on the others' mesh, or on all their ranks on one axis.
    meshes = list(dict.fromkeys(layout.mesh for _, layout in decided.values() if layout is not None))
    mesh = plan.mesh or (meshes[0] if meshes else None)
    if plan.mesh is None and len(meshes) > 1:
        ranks = sorted({rank for each in meshes for rank in each.ranks})
        mesh = MeshSpec({"ranks": len(ranks)}, ranks)
    default = None if mesh is None else Layout(mesh, {})
    if default is None and not problems and any(each is None for each, _ in decided.values()):
        problems.append(
            Problem(
                "missing-mesh",
                found="neither the plan nor a rule names ranks",
                hint="pass mesh= to the plan: there are tensors that no rule mentions",
            )
        )
    chosen = ((name, default if each is None else layout) for name, (each, layout) in decided.items())
    layouts = {name: layout for name, layout in chosen if layout is not None}
    rule_of = {name: each.key if each else "" for name, (each, _) in decided.items()}
    more = tuple(merged_problems(problems, len(plan.rules)) if problems else ()), plan.axis_roles, tensors
    resolution = Resolution(metadata, layouts, rule_of, matched, sharders, mesh, *more)
    if all(rule.kind == "layout" for rule in plan.rules):  # a caller's spec is code, which is asked each time
        vars(plan)["_resolution"] = resolution
    return resolution


def merged_problems(problems: Sequence[Problem], num_rules: int) -> list[Problem]:
    """Merge a problem of the mesh that each rule has: a plan of another mesh is one problem, not one a tensor."""
    alike: dict[Problem, list[Problem]] = {}
    for problem in problems:
        of_mesh = problem.code in ("mesh-mismatch", "unknown-axis", "argument-count")
        alike.setdefault(replace(problem, name="") if of_mesh else problem, []).append(problem)
    merged: list[Problem] = []
    for first, *more in alike.values():
        if 1 < num_rules <= 1 + len(more):
            merged.append(replace(first, found=f"{first.found}; so for all {num_rules}"))
        else:
            merged += [first, *more]
    return merged


class _Name(Pattern):
    """Full name of a tensor with glob letters in it."""

    names_buffers = True

    def __post_init__(self) -> None:
        """Skip parsing: the key is a name."""


def _layout_of(rule: Rule, tensor: TensorMetadata, good: Checked, problems: list[Problem]) -> Layout | None:
    """Return the layout of ``tensor`` under ``rule``; None after recording the problem. ``good`` ones are checked."""
    layout = rule.layout
    if rule.kind == "spec":
        try:
            spec = rule.value if isinstance(rule.value, ShardingSpec) else from_torch(rule.value)
            layout = spec.to_layout(tensor.shape)
        except PlanError as error:
            problems.extend(replace(problem, name=tensor.name) for problem in error.problems)
            return None
    if layout is None or (layout, tensor.shape) in good:  # None: an invalid rule, recorded when it was parsed
        return layout
    wrong = list(layout.problems(tensor.shape, tensor.name))
    if layout.partial:  # DTensor allows it, but a parameter has no pending sum
        wrong.append(
            Problem(
                "partial-value",
                tensor.name,
                axis=next(iter(layout.partial)),
                found=f"a stored {tensor.kind} with the layout {layout}",
                hint="partial values come out of computations; replicate or shard what is stored",
            )
        )
    problems.extend(wrong)
    if wrong:
        return None
    good.add((layout, tensor.shape))
    return layout


def _decide(
    tensor: TensorMetadata, rules: dict[str, list[Rule]], good: Checked, strict: bool, problems: list[Problem]
) -> tuple[Rule | None, Layout | None]:
    """Return the deciding rule of ``tensor`` and its layout; (None, None) without a rule."""
    if not rules:
        if strict and tensor.kind == "parameter":
            text, hint = "no rule mentions it, and the plan is strict", "add a rule; 'R' replicates it"
            problems.append(Problem("unmatched-pattern", tensor.name, found=text, hint=hint))
        return None, None
    # An exact rule decides, or globs that agree.
    problems += [
        Problem(
            "ambiguous-pattern",
            name,
            found="matched by " + " and ".join(repr(rule.key) for rule in rules[name]) + ", which differ",
            hint="add an exact rule for this name, or narrow one of the globs",
        )
        for name, (deciding, *others) in rules.items()
        if not deciding.is_exact and any(not _same_value(other, deciding) for other in others)
    ]
    winners = {alias: deciding for alias, (deciding, *_) in rules.items()}
    # An exact rule for one name of a tied tensor overrides globs for its other names.
    winners = {alias: rule for alias, rule in winners.items() if rule.is_exact} or winners
    layouts = {alias: _layout_of(rule, tensor, good, problems) for alias, rule in winners.items()}
    first = next(iter(winners))
    for alias, layout in layouts.items():
        both = layout is not None and layouts[first] is not None
        if both and layout != layouts[first] and not layout.equivalent_to(layouts[first], tensor.shape):  # type: ignore[union-attr, arg-type]  # `both` says neither is None
            here, there = (f"{name} -> {layouts[name]} by rule {winners[name].key!r}" for name in (first, alias))
            hint = "these names are one tensor: give both the same layout, or only one of them a rule"
            problems.append(Problem("tied-weights", alias, found=f"{here}, but {there}", hint=hint))
    return winners[first], layouts[first]  # equal for all names, or a problem


def _same_value(rule: Rule, other: Rule) -> bool:
    if rule.layout is not None or other.layout is not None:
        return rule.layout == other.layout
    return rule.value is other.value or bool(rule.value == other.value)  # specs may have costly equality


def _place_sharders(rules: list[Rule], metadata: ModelMetadata, problems: list[Problem]) -> dict[str, Any]:
    """Return FQN of module -> Sharder, for every Sharder at a valid place."""
    placed: dict[str, Any] = {}
    for rule in rules:
        assert rule.pattern is not None
        paths = [path for path in metadata.modules if rule.pattern.matches(path)]
        if rule.key == "" or "" in paths:
            problems.append(
                Problem(
                    "sharder-nesting",
                    rule.key,
                    found="a Sharder for the root module",
                    hint="name a submodule; the root cannot be replaced in place",
                )
            )
        elif not paths:  # Sharders need a module
            problems.append(
                Problem("unknown-name", rule.key, found="no module for this Sharder", hint="name a submodule's FQN")
            )
        for path in paths:
            if path and path in placed:
                problems.append(
                    Problem("ambiguous-pattern", path, found="two Sharders match this module", hint="keep one of them")
                )
            elif path:
                placed[path] = rule.value
    for path in placed:
        outer = next((other for other in placed if path.startswith(other + ".")), None)
        if outer is not None:
            problems.append(
                Problem(
                    "sharder-nesting",
                    path,
                    found=f"a Sharder inside of {outer!r}, which has a Sharder itself",
                    hint="keep one of them",
                )
            )
    return placed


def _taken_by_sharder(
    tensor: TensorMetadata, rules: dict[str, list[Rule]], sharders: dict[str, Any], problems: list[Problem]
) -> bool:
    owners = {alias: next((p for p in sharders if alias.startswith(p + ".")), None) for alias in tensor.aliases}
    if not any(owners.values()):
        return False
    if len(set(owners.values())) > 1:  # half of a tied tensor would be replaced
        problems.append(
            Problem(
                "tied-weights",
                tensor.name,
                found=f"tied as {', '.join(tensor.aliases)}, of which a Sharder takes only some",
                hint="untie it, or give the Sharder a module that holds all of its names",
            )
        )
    problems += [
        Problem(
            "ambiguous-pattern",
            alias,
            found=f"module {owners[alias]!r} has a Sharder, which decides about this tensor",
            hint="remove one of the two rules",
        )
        for alias, rule in rules.items()
        if owners[alias] is not None and rule[0].is_exact
    ]
    return True


def plan_problems(plan: PlanContent, resolution: Resolution) -> list[Problem]:
    """Return the problems of a plan that is resolved already, and of its outputs."""
    outputs, local = plan.output_plan or {}, plan.return_local_tensor or ()
    problems, modules = list(resolution.problems), resolution.metadata.modules
    problems += [
        Problem(
            "unknown-name",
            str(path),
            found=f"{argument} names no module of the model",
            hint="name a module's FQN; '' is the root",
        )
        for argument, paths in (("output_plan", outputs), ("return_local_tensor", local))
        for path in (paths if modules else ())
        if path not in modules
    ]
    for path, value in outputs.items():
        if is_spec(value):
            continue  # its layout depends on the output's shape
        name = f"output_plan[{path!r}]"
        try:
            layout = to_layout(value, plan.mesh)
            if plan.mesh is not None and layout.mesh != plan.mesh:
                problems.append(
                    Problem(
                        "mesh-mismatch",
                        name,
                        found=f"its layout is on {layout.mesh!r}, the plan on {plan.mesh!r}",
                        hint="use one mesh",
                    )
                )
        except PlanError as error:
            problems += [replace(problem, name=name) for problem in error.problems]
    problems += [
        Problem("duplicate-name", name, found=f"return_local_tensor names it {count} times", hint="name it once")
        for name, count in Counter(local).items()
        if count > 1
    ]
    return problems
