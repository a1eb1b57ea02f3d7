"""Hugging Face's ``tp_plan``s and ``DistributedConfig``s, written for transformers 5.23.

A ``tp_plan`` maps module names, with ``*`` for layer numbers, to the names of styles. It fixes two things at once:
layouts of parameters and the behaviour of forward. A sharding plan fixes the first. Styles with a forward beyond their
parameters' layout cannot be expressed and are refused by name, unless ``forward="drop"`` is passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.convert.parallelize import (
    STYLES,
    not_expressible,
    one_axis_problems,
    style_of_module,
    tensors_by_module,
)
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import REPLICATE, PlacementSpec, ShardSpec
from shard_spec.plan.content import PlanContent
from shard_spec.plan.globs import glob_rules
from shard_spec.plan.metadata import ModelMetadata, metadata_of
from shard_spec.plan.resolve import resolve

if TYPE_CHECKING:
    from torch import nn


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
    buffers = [alias for tensor in metadata.buffers for alias in tensor.aliases]
    rules = glob_rules(values, (), buffers)
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
            problems.append(
                not_expressible(path, f"the output layout {output} of style {style}", "leave the output layout out")
            )
        by_name.setdefault(generic_name(path), {})[path] = style
    styles = {}
    for name, style_names in by_name.items():
        if len(set(style_names.values())) > 1:  # layers differ
            problems.append(
                not_expressible(
                    name,
                    ", ".join(f"{path}: {style or 'whole'}" for path, style in style_names.items()),
                    "a tp_plan has one style for all layer numbers",
                )
            )
        elif "" not in style_names.values():
            styles[name] = next(iter(style_names.values()))
    # Modules with further names of tied tensors only: an embedding's rows are a head's rows.
    same = {"embedding_rowwise": "colwise_gather_output", "colwise": "embedding_rowwise"}
    modules = resolution.metadata.modules
    for tensor in resolution.metadata.parameters:
        owner, *others = (alias.rpartition(".")[0] for alias in tensor.aliases)
        tied = styles.get(generic_name(owner))
        for path in others:
            if tied is not None and generic_name(path) not in styles:
                alike = modules.get(path) == modules.get(owner)
                styles[generic_name(path)] = tied if alike else same.get(tied, tied)
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
    names = {*map(generic_name, metadata.modules)}
    names |= {generic_name(alias) for tensor in metadata.parameters for alias in tensor.aliases}
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
