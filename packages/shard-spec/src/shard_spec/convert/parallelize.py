"""Conversions to DTensor placements and to ``parallelize_module``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.distributed.parameter_format import dtensor_placement, dtensor_specs
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import REPLICATE, InterleavedShard, PlacementSpec, ReplicateSpec, ShardSpec
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.resolve import Resolution, resolve
from shard_spec.plan.values import is_spec, to_layout

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.metadata import ModelMetadata


def not_expressible(name: str, found: str, hint: str, dim: int | None = None, axis: str | None = None) -> Problem:
    """Report a layout without an equivalent in the target."""
    return Problem("not-expressible", name, dim, axis, found, hint)


def one_axis_problems(found: Resolution, axis: str, target: str) -> list[Problem]:
    """Report, for a target with one axis, tensors sharded along axes other than ``axis``, and Sharders."""
    found.one_mesh.axis_index(axis)  # raises for an unknown axis
    problems = []
    for name, layout in found.layouts.items():
        for other in layout.sharded_axes:
            if other != axis and layout.mesh.axis_size(other) > 1:
                problems.append(
                    not_expressible(
                        name,
                        f"{layout}: {target} is about one axis, here {axis}",
                        f"replicate along {other} here, and shard along it by other means (fully_shard, ...)",
                        axis=other,
                    )
                )
    return problems + sharder_problems(found, target)


def sharder_problems(found: Resolution, target: str) -> list[Problem]:
    """Report modules with a Sharder: no target can express one."""
    return [
        not_expressible(
            path,
            f"a Sharder shards it; {target} cannot express how",
            "leave the Sharder out of the plan that you convert",
        )
        for path in found.sharders
    ]


def to_dtensor_placements(
    plan: PlanContent, module: nn.Module | ModelMetadata | None = None
) -> dict[str, tuple[Placement, ...]]:
    """Return placements of each rule, or with ``module`` of each tensor; see ``ShardingPlan``."""
    problems: list[Problem] = []
    placements: dict[str, tuple[Placement, ...]] = {}
    if module is None:
        problems += plan.problems  # all problems in one error
        for rule in plan.rules:
            if rule.layout is not None:
                placements[rule.key] = _said(rule.key, rule.layout, None, problems)
            elif not rule.problems:
                problems.append(
                    not_expressible(
                        rule.key,
                        f"a {rule.kind}, not placements",
                        "pass the model: placements of specs depend on shapes",
                    )
                )
    else:
        resolved = resolve(plan, module)
        problems += sharder_problems(resolved, "a DTensor")
        for tensor in resolved.metadata.tensors:
            layout = resolved.layouts.get(tensor.name)
            if layout is not None:
                placements[tensor.name] = _said(tensor.name, layout, tensor.shape, problems)
    raise_problems(problems, "DTensor placements cannot express this plan")
    return placements


def _said(name: str, layout: Layout, shape: tuple[int, ...] | None, problems: list[Problem]) -> tuple[Placement, ...]:
    specs, why = dtensor_specs(layout, shape)  # shape decides: some orders need it
    if why is not None:
        problems.append(
            not_expressible(
                name,
                f"{layout}: {why}",
                "shard-reshard moves tensors in any layout; plan.apply keeps fused weights as local parameters",
            )
        )
        return ()  # a placeholder: the problem is raised at the end
    return tuple(dtensor_placement(spec) for spec in specs)


# Style -> placement of a tensor of 1 dim and of one of 2 or more. "-2" is the dim of output features, "-1" of input.
STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    "colwise": (ShardSpec(-1), ShardSpec(-2)),
    "rowwise": (REPLICATE, ShardSpec(-1)),
    "embedding_rowwise": (ShardSpec(0), ShardSpec(0)),
    "embedding_colwise": (ShardSpec(0), ShardSpec(1)),
    "packed_colwise": (ShardSpec(-1), InterleavedShard(-2, 2)),  # two weights in one
    "packed_rowwise": (REPLICATE, InterleavedShard(-1, 2)),
}


def to_parallelize_plan(
    plan: PlanContent, module: nn.Module | ModelMetadata, axis: str = "tp"
) -> dict[str, ParallelStyle]:
    """Map module FQNs to styles; see ``ShardingPlan.to_parallelize_plan``."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.placement_types import Replicate, Shard

    resolution = resolve(plan, module)
    problems = one_axis_problems(resolution, axis, "a parallelize_plan")
    for tensor in resolution.metadata.parameters:
        if len(tensor.aliases) > 1 and cut_dim(resolution.layouts.get(tensor.name), tensor, axis) is not None:
            problems.append(
                not_expressible(
                    tensor.name,
                    f"{' = '.join(tensor.aliases)}: parallelize_module makes a parameter of its own for each module",
                    "use plan.apply, which keeps them tied",
                )
            )
    styles: dict[str, ParallelStyle] = {}
    outputs: dict[str | None, Any] = {"whole": Replicate(), "last": Shard(-1), None: None}
    for path, tensors in tensors_by_module(resolution.metadata).items():
        try:
            style = style_of_module(plan, path, tensors, resolution, axis)
        except PlanError as error:
            problems.extend(error.problems)
            continue
        if style is not None:
            name, output = style
            ids = {"input_layouts": Replicate()} if name == "embedding_rowwise" else {}  # token ids are replicated
            kind: Any = ColwiseParallel if name in ("colwise", "embedding_colwise") else RowwiseParallel
            styles[path] = kind(**ids, output_layouts=outputs[output])
    for path in plan.output_plan or {}:
        if path not in styles:
            problems.append(
                not_expressible(
                    f"output_plan[{path!r}]",
                    "its parameters are replicated, so no style carries its output layout",
                    "use PrepareModuleOutput there yourself",
                )
            )
    for path in plan.return_local_tensor or ():
        if path not in styles:
            problems.append(
                not_expressible(
                    path,
                    "return_local_tensor of a module whose parameters are replicated",
                    "leave it out: its output is a plain tensor already",
                )
            )
    raise_problems(problems, "parallelize_module cannot express this plan")
    return styles


def tensors_by_module(metadata: ModelMetadata) -> dict[str, list[TensorMetadata]]:
    """Group tensors by the FQN of their own module."""
    tensors: dict[str, list[TensorMetadata]] = {}
    for tensor in metadata.tensors:
        tensors.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    return tensors


def cut_dim(layout: Layout | None, tensor: TensorMetadata, axis: str) -> int | None:
    """Return the dim of ``tensor`` sharded by ``axis``, counted from the front, or None."""
    if layout is None:
        return None
    dim = layout.specs[layout.mesh.axis_index(axis)].dim
    return None if dim is None else dim % len(tensor.shape)  # layouts may count from the end


def output_of(plan: PlanContent, path: str, axis: str) -> str | None:
    """Return the entry of ``output_plan``: ``"whole"``, ``"last"`` (last dim sharded), or None."""
    value = (plan.output_plan or {}).get(path)
    if value is None:
        return None
    if not is_spec(value):
        layout = to_layout(value, plan.mesh)
        others = [other for other in layout.sharded_axes if other != axis]
        spec = layout.specs[layout.mesh.axis_index(axis)] if axis in layout.mesh.axis_names else None
        if spec is not None and not others:
            if isinstance(spec, ReplicateSpec):
                return "whole"
            if isinstance(spec, ShardSpec) and spec.dim == -1:
                return "last"
    name = f"output_plan[{path!r}]"
    raise PlanError(not_expressible(name, f"the output layout {value!s}", "write R, or S(-1), along that axis"))


def style_of_module(
    plan: PlanContent, path: str, tensors: list[TensorMetadata], found: Resolution, axis: str, *, packed: bool = False
) -> tuple[str, str | None] | None:
    """Return the style in `STYLES` of a module and its `output_of`. None if its parameters are replicated.

    ``packed`` allows the styles of two weights in one. Where no style fits, ``not-expressible`` is raised.
    """
    layouts = {tensor.name: found.layouts.get(tensor.name) for tensor in tensors}
    if all(cut_dim(layouts[tensor.name], tensor, axis) is None for tensor in tensors):
        return None
    kind = found.metadata.modules.get(path, "")
    linear = ["colwise", "rowwise", *(["packed_colwise", "packed_rowwise"] if packed else [])]  # plain ones first
    for style in {"Linear": linear, "Embedding": ["embedding_rowwise", "embedding_colwise"]}.get(kind, []):
        for tensor in tensors:
            layout = layouts[tensor.name]
            if layout is None or not tensor.shape:  # a Sharder's, or a scalar
                break
            wanted = Layout(layout.mesh, {axis: STYLES[style][min(len(tensor.shape), 2) - 1]})
            if wanted.problems(tensor.shape) or not layout.equivalent_to(wanted, tensor.shape):
                break
        else:
            return style, output_of(plan, path, axis)
    text = ", ".join(f"{tensor.name.rsplit('.', 1)[-1]} {layouts[tensor.name]}" for tensor in tensors)
    raise PlanError(
        not_expressible(
            path,
            f"a {kind or 'module'} with {text}",
            "styles shard a Linear's weight and bias by rows, its weight by columns, or an Embedding; or use tp-styles",
            axis=axis,
        )
    )
