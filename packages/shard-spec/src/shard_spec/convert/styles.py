"""Styles of other tools: DTensor placements, ``parallelize_module``, and transformers' ``tp_plan``.

Hugging Face's ``tp_plan``s and ``DistributedConfig``s are written for transformers 5.23.

A ``tp_plan`` maps module names, with ``*`` for layer numbers, to the names of styles. It fixes two things at once:
layouts of parameters and the behaviour of forward. A sharding plan fixes the first. Styles with a forward beyond their
parameters' layout cannot be expressed and are refused by name, unless ``forward="drop"`` is passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.distributed import dtensor_placement, dtensor_specs
from shard_spec.layout import REPLICATE, InterleavedShard, Layout, MeshSpec, PlacementSpec, ReplicateSpec, ShardSpec
from shard_spec.plan.content import PlanContent, glob_rules, is_spec, to_layout
from shard_spec.plan.resolve import ModelMetadata, Resolution, TensorMetadata, metadata_of, resolve

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement


def not_expressible(name: str, found: str, hint: str, dim: int | None = None, axis: str | None = None) -> Problem:
    """Report a layout without an equivalent in the target."""
    return Problem("not-expressible", name, dim, axis, found, hint)


def one_axis_problems(found: Resolution, axis: str, target: str) -> list[Problem]:
    """Report, for a target with one axis, tensors sharded along axes other than ``axis``, and Sharders."""
    found.one_mesh.axis_index(axis)  # raises for an unknown axis
    problems = [
        not_expressible(
            name,
            f"{layout}: {target} is about one axis, here {axis}",
            f"replicate along {other} here, and shard along it by other means (fully_shard, ...)",
            axis=other,
        )
        for name, layout in found.layouts.items()
        for other in layout.sharded_axes
        if other != axis and layout.mesh.axis_size(other) > 1
    ]
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
        for tensor, layout in resolved.placed():
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
    problems += [
        not_expressible(
            tensor.name,
            f"{' = '.join(tensor.aliases)}: parallelize_module makes a parameter of its own for each module",
            "use plan.apply, which keeps them tied",
        )
        for tensor in resolution.metadata.parameters
        if len(tensor.aliases) > 1 and cut_dim(resolution.layouts.get(tensor.name), tensor, axis) is not None
    ]
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
    problems += [
        not_expressible(
            f"output_plan[{path!r}]",
            "its parameters are replicated, so no style carries its output layout",
            "use PrepareModuleOutput there yourself",
        )
        for path in plan.output_plan or {}
        if path not in styles
    ]
    problems += [
        not_expressible(
            path,
            "return_local_tensor of a module whose parameters are replicated",
            "leave it out: its output is a plain tensor already",
        )
        for path in plan.return_local_tensor or ()
        if path not in styles
    ]
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


_STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    **STYLES,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), STYLES["colwise"]),
    "replicate": (REPLICATE, REPLICATE),
}
# Styles with a forward that no layout of parameters expresses, and the placements of their parameters.
_FORWARD_STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), STYLES["rowwise"]),
    **dict.fromkeys(("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj"), (REPLICATE, REPLICATE)),
    **dict.fromkeys(("all_reduce", "moe_tp_experts", "moe_identity_expert", "local_params"), (REPLICATE, REPLICATE)),
}
_GATHERS = ("colwise_gather_output", "colwise_rep")


def generic_name(name: str) -> str:
    """Replace numeric segments of a name by ``*``, like transformers in ``tp_plan`` lookups."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def from_hf_tp_plan(
    tp_plan: Mapping[str, str],
    module: nn.Module | ModelMetadata,
    mesh: MeshSpec,
    axis: str = "tp",
    *,
    prefix: str = "",
    forward: str = "refuse",
) -> dict[str, Any]:
    """Return the arguments of the plan of a ``tp_plan``'s parameters; see ``ShardingPlan.from_hf_tp_plan``."""
    if forward not in ("refuse", "drop"):
        raise PlanError(Problem("invalid-argument", "forward", found=repr(forward), hint="'refuse' or 'drop'"))
    metadata = metadata_of(module)
    tp_styles: Any = tp_plan  # may come from a file, of any type
    if not isinstance(tp_styles, Mapping) or not all(isinstance(key, str) for key in tp_styles):
        raise PlanError(
            Problem(
                "invalid-plan",
                "tp_plan",
                found=f"{tp_styles!r:.200} of type {type(tp_styles).__name__}",
                hint="a mapping from module name to style",
            )
        )
    styles = {prefix + key: style for key, style in tp_styles.items()}  # base models lack the prefix
    problems = []  # before the model is matched
    for key, style in styles.items():
        if not isinstance(style, str):
            problems.append(
                not_expressible(
                    key, f"{style!r:.200} of type {type(style).__name__}", "a style is text, such as 'colwise'"
                )
            )
        elif style in _FORWARD_STYLES and forward != "drop":
            problems.append(
                not_expressible(
                    key,
                    f"style {style!r} changes what forward does",
                    "pass forward='drop' to take only the layout of its parameters",
                )
            )
        elif style not in (*_STYLES, *_FORWARD_STYLES):
            problems.append(
                not_expressible(
                    key, f"style {style!r}", f"styles that can be read: {', '.join((*_STYLES, *_FORWARD_STYLES))}"
                )
            )
    raise_problems(problems, "the tp_plan has styles that a sharding plan cannot express")
    used: set[str] = set()
    values: dict[str, Layout | None] = {}  # by each name: those of one tensor may differ, which validate() reports
    for tensor in metadata.parameters:
        for alias in tensor.aliases:
            name = generic_name(alias)
            # Its own entry decides, else that of its module.
            key = next((each for each in (name, name.rpartition(".")[0]) if each in styles), None)
            values[alias] = None
            if key is None:
                continue
            used.add(key)  # unused entries are errors
            spec = {**_STYLES, **_FORWARD_STYLES}[styles[key]][min(len(tensor.shape), 2) - 1]  # by number of dims
            values[alias] = Layout(mesh, {axis: spec})
    output = {}
    generic = {path: generic_name(path) for path in metadata.modules}
    for path, name in generic.items():
        if styles.get(name) in _GATHERS:
            output[path] = Layout.replicated(mesh)  # forward gathers the output
    used |= {key for key in styles if key in generic.values()}
    unused = [
        Problem(
            "unmatched-pattern",
            key,
            found="no module or parameter has this name",
            hint="a config's base_model_tp_plan needs prefix='model.'",
        )
        for key in styles
        if key not in used
    ]
    raise_problems(unused, "the tp_plan does not fit the model")
    rules = glob_rules(values, (), [alias for tensor in metadata.buffers for alias in tensor.aliases])
    return {"plan": rules, "output_plan": output or None, "mesh": mesh, "axis_roles": {axis: "model"}}


def to_hf_tp_plan(plan: PlanContent, module: nn.Module | ModelMetadata, axis: str = "tp") -> dict[str, str]:
    """Derive generic module names and styles; see ``ShardingPlan.to_hf_tp_plan``."""
    resolution = resolve(plan, module)
    problems = one_axis_problems(resolution, axis, "a tp_plan")
    by_itself = {"colwise": "last", "rowwise": "whole", "embedding_rowwise": "whole", "embedding_colwise": "whole"}
    by_name: dict[str, dict[str, str]] = {}  # "" where the parameters are replicated
    for path, tensors in tensors_by_module(resolution.metadata).items():
        style, output = "", None
        try:
            style, output = style_of_module(plan, path, tensors, resolution, axis, packed=True) or ("", None)
        except PlanError as error:
            problems.extend(error.problems)
        if style == "colwise" and output == "whole":
            style = "colwise_gather_output"
        elif output not in (None, by_itself.get(style)):
            text = f"the output layout {output} of style {style}"
            problems.append(not_expressible(path, text, "leave the output layout out"))
        by_name.setdefault(generic_name(path), {})[path] = style
    styles = {}
    for name, style_names in by_name.items():
        if len(set(style_names.values())) > 1:  # layers differ
            text = ", ".join(f"{path}: {style or 'whole'}" for path, style in style_names.items())
            problems.append(not_expressible(name, text, "a tp_plan has one style for all layer numbers"))
        elif "" not in style_names.values():
            styles[name] = next(iter(style_names.values()))
    # Modules with further names of tied tensors only: an embedding's rows are a head's rows.
    same = {"embedding_rowwise": "colwise_gather_output", "colwise": "embedding_rowwise"}
    modules = resolution.metadata.modules
    for tensor in resolution.metadata.parameters:
        owner, *others = (alias.rpartition(".")[0] for alias in tensor.aliases)
        tied = styles.get(generic_name(owner))
        for path in others:
            if tied is not None:
                alike = modules.get(path) == modules.get(owner)
                styles.setdefault(generic_name(path), tied if alike else same.get(tied, tied))
    raise_problems(problems, "a tp_plan cannot express this plan")
    return styles


def from_distributed_config(config: object, module: nn.Module) -> tuple[dict[str, Layout], dict[str, str]]:
    """Derive the layouts of a model's parameters, and axes' roles; see ``ShardingPlan.from_distributed_config``.

    The dense mesh of transformers is ``(dp_replicate, fsdp, tp)``, that of experts ``(dp_replicate, efsdp, ep)`` over
    the same ranks. Both are views of ``(dp_replicate, efsdp, ep, tp)``: there ``fsdp`` is ``(efsdp, ep)``, and a group
    of experts is ``(ep, tp)``.
    """
    settings: Any = config if isinstance(config, Mapping) else vars(config)
    sizes = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size")
    pp, replicas, fsdp, tp, ep = (int(settings.get(name) or 1) for name in sizes)
    if pp > 1:
        raise PlanError(
            not_expressible(
                "pp_size", f"{pp} stages; which layers each holds is not in it", "import the plan of one stage"
            )
        )
    if ep > 1 and (ep % tp or (fsdp * tp) % ep):
        raise PlanError(
            Problem(
                "invalid-mesh",
                "ep_size",
                found=f"ep {ep}, tp {tp}, fsdp {fsdp}",
                hint="ep_size is a multiple of tp_size and divides fsdp_size * tp_size",
            )
        )
    inner = max(ep // tp, 1)  # ranks of an expert group beside tp
    axes = {"dp_replicate": replicas, "efsdp" if inner > 1 else "fsdp": fsdp // inner, "ep": inner, "tp": tp}
    mesh = MeshSpec({name: size for name, size in axes.items() if size > 1} or {"tp": 1})  # a mesh needs an axis
    dense = MeshSpec({"dp_replicate": replicas, "fsdp": fsdp, "tp": tp})
    metadata = metadata_of(module)
    names = {
        *map(generic_name, metadata.modules),
        *(generic_name(alias) for tensor in metadata.parameters for alias in tensor.aliases),
    }
    plans: dict[str, dict[str, str]] = {}
    for which, size in (("tp_plan", tp), ("ep_plan", ep)):
        own, configured = dict(getattr(module, which, None) or {}), settings.get(which)
        configured = configured if isinstance(configured, Mapping) else None
        unknown = [str(key) for key in configured or () if key not in {*names, *own}]  # a typo would replicate silently
        raise_problems(
            Problem(
                "unmatched-pattern",
                key,
                found=f"in {which}",
                hint="use the names of modules and parameters, '*' for layer numbers",
            )
            for key in unknown
        )
        # An empty tp_plan turns the model's own off.
        merged = {} if which == "tp_plan" and configured == {} else {**own, **(configured or {})}
        plans[which] = {k: v for k, v in merged.items() if k in names and size > 1}  # a model's own may have more
    experts = plans["ep_plan"]  # their rules take precedence
    styles = {k: v for k, v in plans["tp_plan"].items() if not any(f"{k}.".startswith(f"{e}.") for e in experts)}
    along_tp = resolve(PlanContent(**from_hf_tp_plan(styles, metadata, MeshSpec({"tp": tp}), forward="drop")), metadata)
    layouts, problems = {}, []
    for tensor in metadata.parameters:
        # FSDP2 shards dim 0 after tp; experts are sharded by their group first, then over its copies.
        order = ["tp", *(("fsdp", "efsdp", "ep") if tensor.shape else ())]
        cuts: dict[str, PlacementSpec] = {**dict.fromkeys(order, ShardSpec(0)), "tp": along_tp[tensor.name].specs[0]}
        by_group = any(experts.get(generic_name(alias)) == "grouped_gemm" for alias in tensor.aliases)
        if by_group:
            order, cuts = ["ep", "tp", "efsdp", "fsdp"], dict.fromkeys(("ep", "tp", "efsdp", "fsdp"), ShardSpec(0))
        layouts[tensor.name] = _in_order(mesh, cuts, order)
        if "ep" in mesh.axis_names and not by_group:
            wanted = _in_order(dense, {name: cuts[name] for name in ("tp", "fsdp") if name in cuts}, ["tp", "fsdp"])
            if not layouts[tensor.name].equivalent_to(wanted, tensor.shape):
                problems.append(
                    not_expressible(
                        tensor.name,
                        f"rows of {list(tensor.shape)} over fsdp={fsdp}, of which experts take {inner}, do not divide",
                        "choose sizes that divide its rows",
                    )
                )
    raise_problems(problems, "one mesh cannot express both views of the ranks")
    roles = {"dp_replicate": "data", "fsdp": "data", "efsdp": "data", "ep": "expert", "tp": "model"}
    return layouts, {axis: roles[axis] for axis in mesh.axis_names}


def _in_order(mesh: MeshSpec, cuts: Mapping[str, PlacementSpec], order: Sequence[str]) -> Layout:
    """Return the layout of those axes that ``mesh`` has, first to last in ``order``."""
    layout = Layout(mesh, {axis: cut for axis, cut in cuts.items() if axis in mesh.axis_names})
    return Layout(mesh, layout.specs, [axis for axis in order if axis in layout.sharded_axes])
