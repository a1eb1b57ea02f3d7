"""OptimalPlanner: the plan of least modelled time for a training step within a rank's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.communication import PRESETS, AlphaBetaCostModel, Topology
from shard_spec.estimate.step_options import block_names
from shard_spec.layout import InterleavedShard, Layout, MeshLike, MeshSpec, PlacementSpec, ShardSpec
from shard_spec.optimal.model import (
    ROLE_STRATEGIES,
    Operation,
    StepModel,
    StrategyPerAxis,
    Structure,
    Workload,
    structure_of,
)
from shard_spec.optimal.problem import CappedSolution, InfeasibleError
from shard_spec.plan.resolve import metadata_of
from shard_spec.planners.base import Decisions, LayoutPlanner, OptimalityBound


class OptimalPlanner(LayoutPlanner):
    """Planner of least modelled time of a training step: compute, collectives and resharding together.

    Each axis has one role: it shards the batch or the sequence (weights may then be sharded by rows, as FSDP does), or
    columns and rows. Within the role each operation chooses. The choice is exact (variable elimination). If the memory
    limit binds, one price per byte is charged: the solution is then within the gap proven by the plan's `certificate`.

    Args:
        cost_model: times of collectives and matmuls; `AlphaBetaCostModel()` by default.
        topology: the machine; an H100 SXM cluster by default.
        memory_limit: bytes of a rank for weights, gradients, optimizer state, saved activations, gathered weights and
            loss; all of the topology's `hbm_bytes` by default. Leave room for what `StepModel` leaves out.
        mesh: the axes; any of them may become data, sequence or tensor parallel.
        workload: size of a step.

    Raises:
        PlanError: no block of the model is recognised, or nothing fits in memory: then with the missing bytes.
    """

    def __init__(
        self,
        cost_model: AlphaBetaCostModel | None = None,
        topology: Topology | None = None,
        memory_limit: int | None = None,
        *,
        mesh: MeshLike,
        workload: Workload,
    ) -> None:
        super().__init__(mesh)
        self.cost_model = AlphaBetaCostModel() if cost_model is None else cost_model
        self.topology = PRESETS["h100-sxm"] if topology is None else topology
        self.memory_limit = self.topology.hbm_bytes if memory_limit is None else memory_limit
        self.workload = workload

    def model(self, module: nn.Module) -> StepModel:
        """Return the pairwise model of one training step of `module`."""
        return self._model(self._structure(module), module)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        """Solve the model and derive the layouts."""
        structure = self._structure(module)
        try:
            model, solution = self._solve(structure, module)
        except InfeasibleError as error:
            least = error.least_bytes
            if least < 0:  # not a matter of memory
                raise PlanError(
                    Problem(
                        "does-not-divide",
                        found="no combination of strategies divides the batch, the sequence and the heads",
                        hint="choose another batch or another mesh",
                    )
                ) from error
            needed, over, limit = map(human_bytes, (least, least - self.memory_limit, self.memory_limit))
            raise PlanError(
                Problem(
                    "does-not-fit",
                    "memory_limit",
                    found=f"the smallest plan needs {needed} on each rank, {over} over the limit of {limit}",
                    hint=f"recompute, a smaller batch, more ranks, or memory_limit={least}",
                )
            ) from error
        certificate = OptimalityBound(
            objective=solution.objective,
            lower_bound=solution.lower_bound,
            method="exact elimination" if solution.gap == 0 else "exact elimination, one price per byte",
            memory_bytes=model.memory_bytes(solution.assignment),
            memory_limit=self.memory_limit,
            transient_bytes=model.transient_bytes(solution.assignment),
            choices=model.words(solution.assignment),
        )
        layouts: dict[str, Layout] = {}
        chosen = [choices[at] for choices, at in zip(model.choices, solution.assignment, strict=True)]
        for operation, strategies in zip(model.operations, chosen, strict=True):
            layouts |= layouts_of(operation, strategies, self.mesh)
        # Norms and row biases follow along axes with every weight sharded by rows.
        owners = [each for operation, each in zip(model.operations, chosen, strict=True) if operation.parameters]
        every = [all(strategies[at].weight == "fsdp" for strategies in owners) for at in range(self.mesh.ndim)]
        axes = [axis for axis, alike in zip(self.mesh.axis_names, every, strict=True) if owners and alike]
        if axes:
            cut = Layout(self.mesh, dict.fromkeys(axes, ShardSpec(0)), axes[::-1] if len(axes) > 1 else None)
            rest = (name for name, value in module.named_parameters() if name not in layouts and value.dim() > 0)
            layouts |= dict.fromkeys(rest, cut)
        assert model.roles is not None
        roles = dict(zip(self.mesh.axis_names, model.roles, strict=True))
        return Decisions(layouts, structure.notes, structure.unrecognised, certificate, roles)

    def _structure(self, module: nn.Module) -> Structure:
        degrees = {1}  # products of the axes' sizes
        for size in self.mesh.shape:
            degrees |= {degree * size for degree in degrees}
        return structure_of(module, sorted(degrees))

    def _model(self, structure: Structure, module: nn.Module) -> StepModel:
        units = tuple(block_names(metadata_of(module)))
        return StepModel(structure.operations, self.mesh, self.topology, self.cost_model, self.workload, units)

    def _solve(self, structure: Structure, module: nn.Module) -> tuple[StepModel, CappedSolution]:
        """Solve with one role for each axis, for all combinations of roles, and return the fastest plan.

        The bound is that of the best combination: no plan with one role for each axis is faster.
        """
        mixed, best, bounds, failures = self._model(structure, module), None, [], []
        for roles in itertools.product(ROLE_STRATEGIES, repeat=self.mesh.ndim):
            model = replace(mixed, roles=roles)
            if not all(model.choices):
                continue  # an operation without a strategy
            try:
                if best is not None and model.solver.best.objective >= best[1].objective:
                    continue  # without a limit it is no faster
                solution = _within(model, self.memory_limit)
            except InfeasibleError as error:
                failures.append(error)
                continue
            bounds.append(solution.lower_bound)
            if best is None or solution.objective < best[1].objective:
                best = model, solution
        if best is None:
            needed = [error for error in failures if error.least_bytes >= 0]
            raise min(needed, key=lambda error: error.least_bytes) if needed else InfeasibleError(-1, self.memory_limit)
        model, solution = best
        return model, replace(solution, lower_bound=min(bounds))


def _within(model: StepModel, limit: int) -> CappedSolution:
    """Solve within ``limit`` bytes, transient ones included: what they take is no longer there for kept ones.

    Every plan within the limit has its kept bytes within it, so the first solution's bound holds for all.
    """
    bound, cap = -math.inf, limit
    while True:
        try:
            solution = model.solver.within(cap)
        except InfeasibleError as error:
            if error.least_bytes < 0:
                raise  # not a matter of memory
            least = model.solver.fewest.assignment
            total = model.memory_bytes(least)
            if total > limit:
                raise InfeasibleError(total, limit) from None
            return CappedSolution(least, model.problem.evaluate(least), bound)
        bound = max(bound, solution.lower_bound if cap == limit else bound)
        total = model.memory_bytes(solution.assignment)
        if total <= limit:
            return replace(solution, lower_bound=bound)
        cap -= max(total - limit, limit // 256)  # a step of some size: transient bytes may grow as kept ones shrink


def layouts_of(operation: Operation, strategies: StrategyPerAxis, mesh: MeshSpec) -> dict[str, Layout]:
    """Return the layouts of an operation's parameters.

    Columns and rows shard first, in mesh order. Then rows are sharded for storage, by the last axis first, so the first
    (slowest) axis gathers least.
    """
    placements: dict[str, PlacementSpec] = {cut.name: cut.placement for cut in operation.cuts}
    layouts = {}
    named = list(zip(mesh.axis_names, strategies, strict=True))
    parallel = [axis for axis, strategy in named if strategy.weight in ("column", "row")]
    stored = [axis for axis, strategy in reversed(named) if strategy.weight == "fsdp"]
    names = dict.fromkeys([*placements, *(name for name, _ in operation.parameters)])
    for name in names:
        specs: dict[str, PlacementSpec] = {}
        pieces = 1
        for axis in parallel:
            spec = placements[name]
            if isinstance(spec, InterleavedShard) and isinstance(spec.sections, tuple):
                # Sections are shorter after an earlier axis.
                spec = replace(spec, sections=tuple(size // pieces for size in spec.sections))
            specs[axis] = spec
            pieces *= mesh.axis_size(axis)
        specs.update(dict.fromkeys(stored, ShardSpec(0)))
        layouts[name] = Layout(mesh, specs, [axis for axis in (*parallel, *stored) if axis in specs])
    return layouts
