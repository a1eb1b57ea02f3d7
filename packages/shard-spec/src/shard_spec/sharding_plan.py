"""ShardingPlan: the layout of every tensor of a model, and every operation on a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.convert import styles
from shard_spec.estimate.activations import ESTIMATE_LOCK, ActivationEstimate, Step, activations_of, simulate
from shard_spec.estimate.communication import AlphaBetaCostModel, Communication, Topology, communication_of
from shard_spec.estimate.memory import Memory, memory_of
from shard_spec.estimate.optimizers import OptimizerLike, choose_optimizer
from shard_spec.formatting import human_ranks
from shard_spec.layout import Layout, MeshLike, as_mesh
from shard_spec.plan.content import PlanContent, glob_rules
from shard_spec.plan.resolve import ModelMetadata, Resolution, examine, plan_problems, resolve
from shard_spec.report import PlanDiff, diff, explain

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from shard_spec.apply.apply import Initializer, Source
    from shard_spec.apply.handle import ShardHandle
    from shard_spec.estimate.step_options import Batch, StepOptions


class ShardingPlan(PlanContent):
    """Plan of a model: a layout for each parameter, by name or pattern.

    Args:
        plan: Pattern (see `Pattern`) to the layout of matching tensors: placements (one for each axis of ``mesh``, or a
            mapping from axis to placement), text (``"dp:R, tp:S(0)"``), a ``Layout``, or a ``ShardingSpec`` (torch's
            too). The FQN of a submodule to a ``Sharder`` lets it shard the submodule.
        output_plan: FQN of a module (``""`` is the root) to the layout of its output.
        return_local_tensor: FQNs of modules with sharded outputs to return as this rank's plain tensor.
        mesh: The axes: a ``MeshSpec``, a mapping from axis name to size, text (``"dp=2, tp=4"``), or a ``DeviceMesh``.
            May be left out if every value has its own ranks (layouts, specs).
        axis_roles: Mesh axis to its role in a step: ``"data"`` (ranks see different samples), ``"model"`` (the same
            samples), ``"expert"``, ``"context"`` or ``"stage"``. Planners pass on the axes that they know; bytes of a
            step depend on it. Other axes have the role of their conventional name, or none.
        strict: Report parameters without a rule as a problem; otherwise they are replicated. Buffers without a rule are
            always replicated.

    The mappings are copied; a plan never changes. Wrong rules raise no error here: :meth:`validate` lists all of them,
    together with problems of the model. Plans compare by their content; use ``digest`` as a hash.

    Raises:
        TypeError: If an argument is not a mapping, or not a list of names.
    """

    def __or__(self, other: PlanContent) -> ShardingPlan:
        """Merge the rules of two plans. For one pattern or axis in both, the rule or role of ``other`` is used."""
        if not isinstance(other, PlanContent):
            return NotImplemented
        output = {**(self.output_plan or {}), **(other.output_plan or {})}
        local = dict.fromkeys((*(self.return_local_tensor or ()), *(other.return_local_tensor or ())))
        return ShardingPlan(
            {**self.plan, **other.plan},
            output or None,  # None if empty: equal plans compare equal
            tuple(local) or None,
            mesh=self.mesh if other.mesh is None else other.mesh,
            strict=self.strict or other.strict,
            axis_roles={**self.axis_roles, **other.axis_roles},
        )

    def compact(self, module: nn.Module | ModelMetadata) -> ShardingPlan:
        """Return an equivalent plan with one glob for all layers of equal layout.

        Every parameter is mentioned; specs become layouts.

        Raises:
            PlanError: If the plan does not match the model.
        """
        resolution = resolve(self, module)
        tensors = [tensor for tensor in resolution.metadata.tensors if tensor.name in resolution.layouts]
        parameters = {tensor.name for tensor in tensors if tensor.kind == "parameter"}
        stored = {  # buffers replicate by default
            name: layout
            for name, layout in resolution.layouts.items()
            if name in parameters or not layout.is_replicated
        }
        meshes = {layout.mesh for layout in stored.values()}
        mesh = self.mesh or (next(iter(meshes)) if len(meshes) == 1 else None)
        values: dict[str, Any] = dict(stored)
        aliases = {alias for tensor in tensors if tensor.name in parameters for alias in tensor.aliases} - parameters
        others = {alias for tensor in resolution.metadata.tensors for alias in tensor.aliases} - aliases - parameters
        globs = glob_rules({name: values.pop(name) for name in stored if name in parameters}, aliases, others)
        rules = {**globs, **values, **resolution.sharders}
        more: dict[str, Any] = {"strict": self.strict, "axis_roles": self.axis_roles}
        plan = ShardingPlan(rules, self.output_plan, self.return_local_tensor, mesh=mesh, **more)
        assert dict(resolve(plan, resolution.metadata)) == dict(resolution), "the compact plan differs"
        return plan

    # ---- with a model -----------------------------------------------------------------------------------------

    def resolve(self, module: nn.Module | ModelMetadata) -> Resolution:
        """Return the layout of every parameter and buffer of ``module``, by FQN.

        An exact rule overrides a glob; globs that match one name have to agree. Tied parameters are one tensor: a rule
        for one of the names decides for all.

        Raises:
            PlanError: With every problem of :meth:`validate`.
        """
        return resolve(self, module)

    def validate(self, module: nn.Module | ModelMetadata, *, world_size: int | None = None) -> tuple[Problem, ...]:
        """Return every problem of this plan for ``module``, in one pass. Empty if there is none. Changes nothing.

        Args:
            module: The model, or its metadata.
            world_size: Number of ranks; a mesh of more, fewer or other ranks is a problem.
        """
        resolution = examine(self, module)
        problems = plan_problems(self, resolution)
        idle = set(range(world_size or 0)) - set(resolution.ranks)
        if world_size is not None and resolution.ranks and resolution.ranks[-1] >= world_size:
            problems.append(
                Problem(
                    "mesh-too-large",
                    found=f"the plan names ranks up to {resolution.ranks[-1]}, there are {world_size} ranks",
                    hint="start more processes or use a smaller mesh",
                )
            )
        elif resolution.ranks and idle:
            problems.append(
                Problem(
                    "mesh-mismatch",
                    found=f"the plan says nothing about ranks {human_ranks(sorted(idle))} of {world_size}",
                    hint="use a mesh of all ranks; for a plan of a part of them leave world_size out",
                )
            )
        return tuple(dict.fromkeys(problems))  # once each, in order

    def memory(
        self,
        module: nn.Module | ModelMetadata,
        batch: Batch | None = None,
        *,
        optimizer: OptimizerLike = "adamw",
        grads: bool | str = True,
        **step: Unpack[StepOptions],
    ) -> Memory:
        """Count bytes of parameters, buffers, gradients and optimizer state on each rank, exactly.

        With a batch also the peak of a training step beside them: activations, logits and loss. Gradients that backward
        has yet to make at the peak are taken off again, unless ``accumulate`` says that earlier batches have made them.

        Args:
            module: The model, or its metadata.
            batch: As in :meth:`activations`. None: the state alone is counted.
            optimizer: A name (``"sgd"``, ``"adamw"``, ``"mixed-adamw"``, ``"adamw8bit"``, ``"whole-muon"``, ...; see
                :mod:`shard_spec.estimate.optimizers`), a class, a ``functools.partial`` or an instance of an optimizer,
                an ``OptimizerState``, None, or a mapping from patterns of parameters to these, of which the first match
                decides: ``{"**.{up,down}.weight": "muon", "**": "adamw"}``.
            grads: True to count gradients, or their dtype if it is not the parameters'.
            step: How the step runs; see :class:`StepOptions`.

        Raises:
            PlanError: If the plan does not match the model, or a name is not known.
        """
        with ESTIMATE_LOCK:
            resolution = resolve(self, module)
            static = memory_of(resolution, step, optimizer=optimizer, grads=grads, module=module)
            if batch is None:
                return static
            return _beside(static, _simulated(resolution, module, batch, step), module, grads, step)

    def cost(
        self,
        module: nn.Module | ModelMetadata,
        batch: Batch,
        *,
        optimizer: OptimizerLike = "adamw",
        topology: Topology | str | None = None,
        cost_model: AlphaBetaCostModel | None = None,
        **step: Unpack[StepOptions],
    ) -> tuple[Memory, Communication]:
        """Return memory and communication of a training step, from one simulation; see :meth:`memory`.

        Args:
            module: The model.
            batch: As in :meth:`activations`.
            optimizer: As in :meth:`memory`.
            topology: Machine for the time of collectives and products, or the name of a preset: ``"h100-sxm"``.
            cost_model: Times of both; default is the alpha-beta model.
            step: How the step runs; see :class:`StepOptions`.

        Raises:
            PlanError: If the plan does not match the model, or its layouts use several meshes.
        """
        with ESTIMATE_LOCK:
            resolution = resolve(self, module)
            static = memory_of(resolution, step, optimizer=optimizer, module=module)
            run = _simulated(resolution, module, batch, step)
            choice = choose_optimizer(optimizer, resolution.metadata, module)
            moved = communication_of(resolution, run, step, choice, topology=topology, cost_model=cost_model)
            return _beside(static, run, module, True, step), moved

    def activations(self, module: nn.Module, batch: Batch, **step: Unpack[StepOptions]) -> ActivationEstimate:
        """Estimate a training step's memory beside the model's state on one rank.

        Args:
            module: The model, on any device; forward, loss and backward run once on shapes only (the meta device).
            batch: ``(sequences, length)`` of token ids over all ranks; or one rank's arguments of forward: a tensor, a
                tuple of arguments or a mapping of keyword arguments, for example ``{"input_ids": ids}``.
            step: How the step runs; see :class:`StepOptions`.

        Raises:
            PlanError: If the plan does not match the model.
        """
        with ESTIMATE_LOCK:
            return activations_of(_simulated(resolve(self, module), module, batch, step), module, step)

    def communication(
        self,
        module: nn.Module | ModelMetadata,
        batch: Batch | None = None,
        *,
        optimizer: OptimizerLike = None,
        topology: Topology | str | None = None,
        cost_model: AlphaBetaCostModel | None = None,
        **step: Unpack[StepOptions],
    ) -> Communication:
        """Return the communication of one training step by axis.

        Along data axes it follows from the plan; along model axes a step runs on shapes.

        Args:
            module: The model, or its metadata.
            batch: As in :meth:`activations`. None: do not count activations.
            optimizer: As in :meth:`memory`; one on full matrices (``"whole-muon"``) exchanges gradients and values.
            topology: Machine for the time of collectives, or the name of a preset.
            cost_model: Times of collectives; default is the alpha-beta model.
            step: How the step runs; see :class:`StepOptions`.

        Raises:
            PlanError: If the plan does not match the model, or its layouts use several meshes.
        """
        with ESTIMATE_LOCK:
            resolution = resolve(self, module)
            run = None if batch is None else _simulated(resolution, module, batch, step)
            choice = choose_optimizer(optimizer, resolution.metadata, module)
            return communication_of(resolution, run, step, choice, topology=topology, cost_model=cost_model)

    def explain(self, name: str | None = None, module: nn.Module | ModelMetadata | None = None) -> str:
        """Explain this plan in words. With ``name`` one tensor; with ``module`` also reasons and local shapes."""
        return explain(self, name, module)

    def diff(self, other: ShardingPlan, module: nn.Module | ModelMetadata | None = None) -> PlanDiff:
        """Return the changes to ``other``: rules, and with ``module`` the tensors of different layout."""
        return diff(self, other, module)

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        source: Source = "scatter",
        src_rank: int = 0,
        group: ProcessGroup | None = None,
        init: Initializer | None = None,
        seed: int = 0,
    ) -> ShardHandle:
        """Replace the tensors of ``module`` by their shards on ``mesh``, all or nothing. Every rank calls it.

        Tensors become DTensors, fused weights local parameters with the sections in ``_sharding_info``. See
        :func:`shard_spec.apply_plan` for the arguments.

        Returns:
            A handle with ``plan``, ``actions`` (``explain()``, ``to_json()``) and ``undo()``.

        Raises:
            PlanError: With every problem of every rank, before any change.
        """
        from shard_spec.apply.apply import apply_plan  # imports torch.distributed.tensor

        return apply_plan(module, mesh, self, source=source, src_rank=src_rank, group=group, init=init, seed=seed)

    # ---- files and other forms --------------------------------------------------------------------------------

    @classmethod
    def from_layouts(
        cls, layouts: Mapping[str, Layout], *, strict: bool = False, axis_roles: Mapping[str, str] | None = None
    ) -> ShardingPlan:
        """Build a plan with one exact rule for each name, e.g. ``ShardingPlan.from_layouts(plan.resolve(model))``."""
        meshes = {layout.mesh for layout in layouts.values()}
        return cls(layouts, mesh=next(iter(meshes)) if len(meshes) == 1 else None, strict=strict, axis_roles=axis_roles)

    @classmethod
    def from_module(cls, module: nn.Module, mesh: MeshLike | None = None) -> ShardingPlan:
        """Return the plan of a live model: DTensors and local shards by their placements, plain tensors replicated.

        Args:
            module: The model.
            mesh: The mesh of plain tensors, if no parameter has one.

        Raises:
            PlanError: For each placement that a plan cannot express.
        """
        from shard_spec.plan.from_module import layouts_of_module

        return cls.from_layouts(layouts_of_module(module, as_mesh(mesh)))

    # ---- conversions ------------------------------------------------------------------------------------------

    def to_dtensor_placements(
        self, module: nn.Module | ModelMetadata | None = None
    ) -> dict[str, tuple[Placement, ...]]:
        """Return DTensor placements of each rule, or with ``module`` of each parameter and buffer.

        Raises:
            PlanError: ``not-expressible`` for each layout without DTensor placements.
        """
        return styles.to_dtensor_placements(self, module)

    def to_parallelize_plan(self, module: nn.Module | ModelMetadata, axis: str = "tp") -> dict[str, ParallelStyle]:
        """Return the plan of torch's ``parallelize_module`` along ``axis``: module FQN to ``ParallelStyle``.

        ``output_plan`` sets the styles' output layouts: ``R`` or ``S(-1)`` along the axis.

        Args:
            module: The model.
            axis: The mesh axis of the styles; along others nothing may be sharded.

        Raises:
            PlanError: ``not-expressible`` for each module that no style fits, and for tied parameters, which
                ``parallelize_module`` would untie.
        """
        return styles.to_parallelize_plan(self, module, axis)

    def to_dcp(self, module: nn.Module | ModelMetadata, state_dict: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Wrap a state dict of local tensors for ``torch.distributed.checkpoint``, under any layout.

        Each box of a local tensor becomes a chunk: nothing is gathered, fused and uneven weights included. Loading
        fills the local tensors in place. DTensors and other values pass unchanged.

        Args:
            module: The model (on meta), for the global shapes.
            state_dict: FQN to this rank's local tensor.
            rank: This rank on the layouts' mesh.

        Raises:
            PlanError: With every tensor of another layout.
        """
        from shard_spec.convert.dcp import to_dcp  # imports torch.distributed.tensor: a second or more

        return to_dcp(self, module, state_dict, rank)

    def to_hf_tp_plan(self, module: nn.Module | ModelMetadata, axis: str = "tp") -> dict[str, str]:
        """Return the ``tp_plan`` of transformers along ``axis``: module name, ``*`` for layer numbers, to style.

        Raises:
            PlanError: ``not-expressible`` for each module that no style fits, and for layers that differ.
        """
        return styles.to_hf_tp_plan(self, module, axis)

    @classmethod
    def from_hf_tp_plan(
        cls,
        tp_plan: Mapping[str, str],
        module: nn.Module | ModelMetadata,
        mesh: MeshLike,
        axis: str = "tp",
        *,
        prefix: str = "",
        forward: str = "refuse",
    ) -> ShardingPlan:
        """Return the plan of a transformers ``tp_plan``.

        Args:
            tp_plan: Module or parameter name, ``*`` for layer numbers, to style: ``model.tp_plan``, or
                ``config.base_model_tp_plan`` with ``prefix="model."``.
            module: The model (on meta).
            mesh: The mesh of the plan.
            axis: The sharding axis.
            prefix: Prefix of every name.
            forward: ``"refuse"`` styles that change forward beyond a plan, or ``"drop"`` that change.

        Raises:
            PlanError: ``not-expressible`` for each such style, ``unmatched-pattern`` for each unused entry.
        """
        mesh_spec = as_mesh(mesh)
        assert mesh_spec is not None
        return cls(**styles.from_hf_tp_plan(tp_plan, module, mesh_spec, axis, prefix=prefix, forward=forward))

    @classmethod
    def from_distributed_config(cls, config: object, module: nn.Module) -> ShardingPlan:
        """Return the plan of a model loaded by transformers with a ``DistributedConfig``.

        Its axes are ``dp_replicate``, ``fsdp`` and ``tp``, those of more than one rank. For ``ep_size`` greater than
        ``tp_size`` experts are sharded over ``ep`` and ``tp``, and ``fsdp`` is ``efsdp`` and ``ep``.

        Args:
            config: A ``DistributedConfig`` or its ``to_dict()``; a plan of None means the model's own.
            module: The model (on meta).

        Raises:
            PlanError: ``not-expressible`` for pipeline stages and unknown styles.
        """
        layouts, roles = styles.from_distributed_config(config, module)
        return cls.from_layouts(layouts, axis_roles=roles).compact(module)


def _simulated(resolution: Resolution, module: nn.Module | ModelMetadata, batch: Batch, step: StepOptions) -> Step:
    if isinstance(module, ModelMetadata):
        raise PlanError(Problem("unverified", "batch", found="names and shapes alone", hint="pass the nn.Module"))
    return simulate(resolution, module, batch, **step)


def _beside(static: Memory, run: Step, module: Any, grads: bool | str, step: StepOptions) -> Memory:
    """Return the bytes of the state with those of a simulated step."""
    if grads is False and any(each.requires_grad for each in module.parameters()):
        raise PlanError(
            Problem(
                "conflicting-arguments",
                "grads",
                found="grads=False beside a batch, whose step makes gradients in its backward",
                hint="leave grads out; to count a state without gradients leave batch out",
            )
        )
    # Off the CPU torch's optimizers update all parameters at once.
    return static.with_activations(
        activations_of(run, module, step),
        foreach=any(each.device.type != "cpu" for each in module.parameters()),
        buckets=step.get("ddp") == "buckets",
    )
