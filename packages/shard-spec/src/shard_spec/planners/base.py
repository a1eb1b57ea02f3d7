"""Base classes of planners, which turn a module into a plan, and their composition; FullyShardPlanner."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.estimate.step_options import block_names, expert_modules
from shard_spec.layout import Layout, MeshLike, MeshSpec, ReplicateSpec, ShardSpec, StageShard, as_mesh
from shard_spec.plan.content import glob_rules, pattern_of
from shard_spec.plan.resolve import metadata_of
from shard_spec.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class OptimalityBound:
    """Bound on a plan's distance from the optimum, under the planner's cost model.

    Attributes:
        objective: modelled cost of the plan (seconds a step, or bytes for balancing).
        lower_bound: minimum cost over the same search space, or less.
        unit: unit of `objective` and `lower_bound`.
        method: name of the method behind the bound.
        memory_bytes: bytes of a step on the fullest rank, as ``plan.memory`` counts them: weights, gradients, state,
            saved activations, gathered weights and loss; ``None`` if memory was not modelled.
        memory_limit: memory cap in bytes, if one was set.
        choices: name of each node of the model to its strategy.
        transient_bytes: share of `memory_bytes` for gathered weights and the loss.
    """

    objective: float
    lower_bound: float
    unit: str = "s"
    method: str = "exact"
    memory_bytes: int | None = None
    memory_limit: int | None = None
    choices: tuple[tuple[str, str], ...] = ()
    transient_bytes: int = 0

    @property
    def gap(self) -> float:
        """Maximum distance from the optimum as a share of the objective; 0 means proven optimal."""
        if self.objective == self.lower_bound:
            return 0.0  # covers an objective of 0
        return (self.objective - self.lower_bound) / abs(self.objective)

    def __str__(self) -> str:
        proven = "optimal" if self.gap == 0 else f"at most {self.gap:.2%} above the best"
        text = f"{self.objective:.6g} {self.unit}, {proven} (bound {self.lower_bound:.6g} {self.unit}, {self.method})"
        if self.memory_limit is not None:
            text += f"; {human_bytes(self.memory_bytes or 0)} of {human_bytes(self.memory_limit)}"
        return text


class ShardingPlanner(abc.ABC):
    """Base class of all planners: subclass it and write `build_plan`."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan that shards `module` over the ranks.

        Args:
            module: read for its structure, shapes and configuration, never its values; it may be on the meta device.
                It is not changed.

        Returns:
            The plan: a layout for each sharded parameter.
        """


@dataclass(frozen=True)
class Decisions:
    """Decisions of a planner: layouts by FQN, and remarks for readers of the plan.

    Attributes:
        layouts: FQN to layout, for parameters sharded along an axis of this planner.
        notes: remarks for readers of the plan, in a stable order.
        unrecognised: FQN of each matmul weight of unknown role, with the reason.
        certificate: bound on the distance from the optimum, if the planner proves one.
        axis_roles: role of each axis used by this planner (see `shard_spec.layout.mesh`); bytes of a step depend
            on it.
    """

    layouts: Mapping[str, Layout]
    notes: tuple[Problem, ...] = ()
    unrecognised: Mapping[str, Problem] = field(default_factory=dict)
    certificate: OptimalityBound | None = None
    axis_roles: Mapping[str, str] = field(default_factory=dict)


class PlannedSharding(ShardingPlan):
    """A `ShardingPlan` with its planner's remarks (see `Decisions`); equal to a plain plan with the same content."""

    notes: tuple[Problem, ...]
    unrecognised: Mapping[str, Problem]
    certificate: OptimalityBound | None

    def __init__(self, rules: Mapping[str, Layout], mesh: MeshSpec, decisions: Decisions) -> None:
        super().__init__(rules, mesh=mesh, axis_roles=decisions.axis_roles)
        vars(self).update(
            notes=tuple(decisions.notes),  # frozen base class: no plain assignment
            unrecognised=dict(decisions.unrecognised),
            certificate=decisions.certificate,
        )

    def __getstate__(self) -> dict[str, Any]:
        extra = {name: getattr(self, name) for name in ("notes", "unrecognised", "certificate")}
        return {**super().__getstate__(), **extra}


class LayoutPlanner(ShardingPlanner):
    """A planner on one mesh that can follow another planner and reads its decisions.

    Args:
        mesh: the axes: a `MeshSpec`, a mapping from axis name to size, text (``"dp=2, tp=4"``), or a DeviceMesh.
    """

    mesh: MeshSpec

    def __init__(self, mesh: MeshLike) -> None:
        spec = as_mesh(mesh)
        assert spec is not None
        self.mesh = spec

    @abc.abstractmethod
    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        """Choose shardings along this planner's axes; `given` holds the shardings along other axes."""

    def build_plan(self, module: nn.Module) -> PlannedSharding:
        """Build the plan, with `notes`, `unrecognised` and `certificate`.

        Raises:
            PlanError: the planner's own settings do not fit the module.
        """
        decisions = self.decide(module, {})
        layouts: dict[str, Layout | None] = {name: None for name, _ in module.named_parameters()}
        layouts |= {name: each for name, each in decisions.layouts.items() if not each.is_replicated}
        others = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(layouts)
        buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        return PlannedSharding(glob_rules(layouts, others, buffers), self.mesh, decisions)


class ComposedPlanner(LayoutPlanner):
    """Several planners in sequence; each shards the local shards of those before it.

    On a tensor dimension that two of them shard, the earlier axis comes first: ``compose(MegatronPlanner(mesh),
    FullyShardPlanner(mesh))`` shards tensor-parallel slices over the data-parallel ranks.
    """

    def __init__(self, planners: Sequence[LayoutPlanner]) -> None:
        if not planners:
            raise ValueError("compose() needs at least one planner.")
        for planner in planners:
            if isinstance(planner, type) or not hasattr(planner, "mesh"):
                raise PlanError(
                    Problem(
                        "wrong-type",
                        "planners",
                        found=f"{planner!r:.100}",
                        hint="pass planners that have a mesh, such as MegatronPlanner(mesh)",
                    )
                )
        meshes = list(dict.fromkeys(planner.mesh for planner in planners))
        if len(meshes) > 1:
            raise PlanError(
                Problem(
                    "mesh-mismatch",
                    "planners",
                    found=" and ".join(repr(mesh) for mesh in meshes),
                    hint="give all composed planners the same mesh; each names the axes it uses",
                )
            )
        super().__init__(meshes[0])
        self.planners = tuple(planners)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        layouts = dict(given)
        notes: list[Problem] = []
        unrecognised: dict[str, Problem] = {}
        certificate = None
        roles: dict[str, str] = {}
        for planner in self.planners:
            decisions = planner.decide(module, layouts)
            # `merged` puts the axes of earlier planners first in the shard order.
            layouts = merged(layouts, decisions.layouts)
            notes += decisions.notes
            unrecognised.update(decisions.unrecognised)
            certificate = decisions.certificate or certificate
            # An axis of experts is a data axis, too: the first of the two says more.
            differ = {axis: {each, roles.get(axis, each)} for axis, each in decisions.axis_roles.items()}
            clashing = [axis for axis, each in differ.items() if len(each) > 1 and each != {"expert", "data"}]
            hint = "give each planner its own axes"
            for axis in clashing:
                raise PlanError(
                    Problem(
                        "invalid-argument",
                        "planners",
                        axis=axis,
                        found=f"a {roles[axis]} axis of one planner, a {decisions.axis_roles[axis]} axis of another",
                        hint=hint,
                    )
                )
            roles = {**decisions.axis_roles, **roles}
        return Decisions(layouts, tuple(notes), unrecognised, certificate, roles)


def compose(*planners: LayoutPlanner) -> ComposedPlanner:
    """Combine planners: ``compose(MegatronPlanner(mesh), FullyShardPlanner(mesh)).build_plan(model)``."""
    return ComposedPlanner(planners)


def merge_notes(notes: Iterable[Problem]) -> tuple[Problem, ...]:
    """Merge equal remarks on several layers: the numbers in their names become ``*``."""
    groups: dict[Problem, list[Problem]] = {}
    for note in notes:
        groups.setdefault(replace(note, name=pattern_of(note.name)), []).append(note)
    return tuple(key if len(set(members)) > 1 else members[0] for key, members in groups.items())


def merged(first: Mapping[str, Layout], second: Mapping[str, Layout]) -> dict[str, Layout]:
    """Combine the axes of both layouts. On a shared tensor dimension the axes of `first` come first."""
    layouts = dict(first)
    problems = []
    for name, layout in second.items():
        before = layouts.get(name)
        if before is None:  # first planner to shard it
            layouts[name] = layout
            continue
        twice = [axis for axis in layout.sharded_axes if axis in before.sharded_axes]
        if twice:
            problems.append(
                Problem(
                    "duplicate-name",
                    name,
                    axis=twice[0],
                    found=f"one planner gives {before}, the other {layout}",
                    hint="give each planner its own axes",
                )
            )
            continue
        added = zip(layout.mesh.axis_names, layout.specs, strict=True)
        specs = {axis: spec for axis, spec in added if not isinstance(spec, ReplicateSpec)}
        both = [specs.get(axis, spec) for axis, spec in zip(before.mesh.axis_names, before.specs, strict=True)]
        shared = set(before.sharded_axes.values()) & set(layout.sharded_axes.values())
        order = (*before.sharded_axes, *layout.sharded_axes) if shared else None
        layouts[name] = Layout(layout.mesh, both, order)
    if problems:  # all contradictions in one error
        raise PlanError(problems, "planners contradict each other")
    return layouts


class FullyShardPlanner(LayoutPlanner):
    """ZeRO-3, as in ``torch.distributed.fsdp.fully_shard``: dim 0 sharded over one or several axes.

    After another planner (``compose(MegatronPlanner(mesh), FullyShardPlanner(mesh))``) it shards the local shards
    of that planner. Where rows do not divide, the last ranks hold fewer or none, as with FSDP2. An exact rule keeps a
    parameter replicated: ``planner.build_plan(model) | ShardingPlan({"norm.weight": "dp:R"}, mesh=mesh)``.

    Args:
        mesh: the axes of the plan.
        axis: one sharding axis or several, outermost first. Other axes replicate (a replica axis beside
            ``axis="dp_shard"`` gives hybrid sharding).
        context: those of them along which ranks see other tokens of the same samples (context parallelism); along the
            others they see other samples.

    Raises:
        PlanError: an axis is not in the mesh.
    """

    def __init__(self, mesh: MeshLike, axis: str | Sequence[str] = "dp", *, context: str | Sequence[str] = ()) -> None:
        super().__init__(mesh)
        self.axes, self.context = ((each,) if isinstance(each, str) else tuple(each) for each in (axis, context))
        for name in (*self.axes, *self.context):
            self.mesh.axis_size(name)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        layouts = {}
        along: dict[tuple[str, ...], Layout] = {}  # many parameters share one
        for name, parameter in module.named_parameters():
            # Blocks of experts lie along one of these axes already.
            used = given[name].sharded_axes if name in given else ()
            axes = tuple(axis for axis in self.axes if len(self.axes) == 1 or axis not in used)
            if axes not in along:
                along[axes] = Layout(self.mesh, dict.fromkeys(axes, ShardSpec(0)), axes if len(axes) > 1 else None)
            if parameter.dim() > 0 and axes:
                layouts[name] = along[axes]
        return Decisions(
            layouts, axis_roles={**dict.fromkeys(self.axes, "data"), **dict.fromkeys(self.context, "context")}
        )


class ExpertParallelPlanner(LayoutPlanner):
    """Blocks of experts on an axis: dim 0 of experts in one parameter is sharded, everything else is replicated.

    Each rank sees its own samples; tokens travel to the ranks of their experts and back. Compose it with
    `FullyShardPlanner`, which shards the rest, and each block of experts over the ranks that share it.

    Args:
        mesh: the axes of the plan.
        axis: the axis of the experts.

    Raises:
        PlanError: the axis is not in the mesh; by `build_plan`, the model has no experts in one parameter, or their
            number does not divide by the axis.
    """

    def __init__(self, mesh: MeshLike, axis: str = "ep") -> None:
        super().__init__(mesh)
        self.axis, self.size = axis, self.mesh.axis_size(axis)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        parameters = metadata_of(module).parameters
        owners = expert_modules(parameters)
        experts = [each for each in parameters if each.name.rpartition(".")[0] in owners and len(each.shape) > 1]
        if not experts:
            raise PlanError(
                Problem(
                    "conflicting-arguments",
                    axis=self.axis,
                    found="no experts in one parameter",
                    hint="experts in a ModuleList are parameters of their own: plan them with rules, or stack them",
                )
            )
        raise_problems(
            Problem(
                "does-not-divide",
                each.name,
                dim=0,
                axis=self.axis,
                found=f"{each.shape[0]} experts",
                hint=f"give {self.axis} a size that divides the number of experts",
            )
            for each in experts
            if each.shape[0] % self.size
        )
        cut = Layout(self.mesh, {self.axis: ShardSpec(0)})
        return Decisions({each.name: cut for each in experts}, axis_roles={self.axis: "expert"})


class StagePlanner(LayoutPlanner):
    """Stages of a pipeline: each repeated block lies on one stage, in order, and evenly unless `blocks` says otherwise.

    What the model has before its blocks lies on the first stage, what it has after them on the last. A weight that is
    tied over both lies on the first; `plan.memory` counts its copy on the last. The plan is for memory and bytes, and
    to move weights; it holds no schedule. Compose it with planners of the other axes.

    Args:
        mesh: the axes of the plan.
        axis: the axis of the stages.
        blocks: number of blocks on each stage; evenly by default, the first stages one more.

    Raises:
        PlanError: the axis is not in the mesh; by `build_plan`, the numbers of blocks are not those of the model.
    """

    def __init__(self, mesh: MeshLike, axis: str = "pp", blocks: Sequence[int] | None = None) -> None:
        super().__init__(mesh)
        self.axis, self.size = axis, self.mesh.axis_size(axis)
        self.blocks = None if blocks is None else tuple(blocks)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        metadata = metadata_of(module)
        names = block_names(metadata)
        even = tuple(len(names) // self.size + (at < len(names) % self.size) for at in range(self.size))
        sizes = even if self.blocks is None else self.blocks
        if len(sizes) != self.size or sum(sizes) != len(names) or min(sizes) < 1:
            raise PlanError(
                Problem(
                    "does-not-divide",
                    "blocks",
                    axis=self.axis,
                    found=f"{', '.join(map(str, sizes))} blocks on {self.size} stages of a model with {len(names)}",
                    hint="give each stage at least one block, and all blocks a stage",
                )
            )
        stages = [stage for stage, count in enumerate(sizes) for _ in range(count)]
        stage_of = dict(zip(names, stages, strict=True))
        layouts, passed = {}, False  # blocks have come
        for tensor in metadata.parameters:
            parts = tensor.name.split(".")
            outer = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
            block = next((name for name in outer if name in stage_of), None)
            stage = stage_of[block] if block is not None else (self.size - 1 if passed else 0)
            passed = passed or block is not None
            if tensor.shape:  # a number is on every stage
                layouts[tensor.name] = Layout(self.mesh, {self.axis: StageShard(stage)})
        return Decisions(layouts, axis_roles={self.axis: "stage"})
