"""Hugging Face ``tp_plan``s: module names, with ``*`` for layer numbers, to the names of styles.

Written for transformers 5.23. A ``tp_plan`` fixes two things at once: layouts of parameters and the behaviour of
forward. A sharding plan fixes the first. Styles with a forward beyond their parameters' layout cannot be expressed and
are refused by name, unless ``forward="drop"`` is passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.convert.parallelize import (
    cut_dim,
    cut_elsewhere,
    not_expressible,
    output_of,
    sharder_problems,
    tensors_by_module,
    the_axis,
)
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import REPLICATE, InterleavedShard, PlacementSpec, ShardSpec
from shard_spec.plan.content import PlanContent
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata, metadata_of
from shard_spec.plan.resolve import Resolution, resolve

if TYPE_CHECKING:
    from torch import nn

# Style -> placement of a tensor of 1 dim and of one of 2 or more. "-2" is the dim of output features, "-1" of input.
_STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    "colwise": (ShardSpec(-1), ShardSpec(-2)),
    "colwise_gather_output": (ShardSpec(-1), ShardSpec(-2)),
    "colwise_rep": (ShardSpec(-1), ShardSpec(-2)),
    "rowwise": (REPLICATE, ShardSpec(-1)),
    "embedding_rowwise": (ShardSpec(0), ShardSpec(0)),
    "embedding_colwise": (ShardSpec(0), ShardSpec(1)),
    "packed_colwise": (ShardSpec(-1), InterleavedShard(-2, 2)),
    "packed_rowwise": (REPLICATE, InterleavedShard(-1, 2)),
    "replicate": (REPLICATE, REPLICATE),
}
# Styles with a forward that no layout of parameters expresses, and the placements of their parameters.
_FORWARD_STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    "rowwise_split_input": (REPLICATE, ShardSpec(-1)),
    "rowwise_rep": (REPLICATE, ShardSpec(-1)),
    "sequence_parallel": (REPLICATE, REPLICATE),
    "replicated_with_grad_allreduce": (REPLICATE, REPLICATE),
    "mla_kv_a_proj": (REPLICATE, REPLICATE),
    "all_reduce": (REPLICATE, REPLICATE),
    "moe_tp_experts": (REPLICATE, REPLICATE),
    "moe_identity_expert": (REPLICATE, REPLICATE),
    "local_params": (REPLICATE, REPLICATE),
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
) -> PlanContent:
    """Build the plan of a ``tp_plan``'s parameters; see ``ShardingPlan.from_hf_tp_plan``."""
    if forward not in ("refuse", "drop"):
        raise PlanError(Problem("invalid-argument", "forward", found=repr(forward), hint="'refuse' or 'drop'"))
    metadata = metadata_of(module)
    tp_styles: Any = tp_plan  # may come from a file, of any type
    if not isinstance(tp_styles, Mapping) or not all(isinstance(key, str) for key in tp_styles):
        reason = f"{tp_styles!r:.200} of type {type(tp_styles).__name__}"
        raise PlanError(Problem("invalid-plan", "tp_plan", found=reason, hint="a mapping from module name to style"))
    styles = {prefix + key: style for key, style in tp_styles.items()}  # base models lack the prefix
    problems = _style_problems(styles, forward)  # before the model is matched
    raise_problems(problems, "the tp_plan has styles that a sharding plan cannot express")
    used: set[str] = set()
    rules: dict[str, str] = {}
    exact: dict[str, str] = {}
    for tensor in metadata.parameters:
        for alias in tensor.aliases:
            key = _key_of(generic_name(alias), styles)
            if key is None:
                continue
            used.add(key)  # unused entries are errors
            spec = {**_STYLES, **_FORWARD_STYLES}[styles[key]][min(len(tensor.shape), 2) - 1]  # by number of dims
            exact[alias] = rules[generic_name(alias)] = str(Layout(mesh, {axis: spec}))
    output = {}
    generic = {path: generic_name(path) for path in metadata.modules}
    for path, name in generic.items():
        if styles.get(name) in _GATHERS:
            output[path] = str(Layout.replicated(mesh))  # forward gathers the output
    used |= {key for key in styles if key in generic.values()}
    raise_problems([_unused(key) for key in styles if key not in used], "the tp_plan does not fit the model")
    return PlanContent(rules if _only_these(rules, exact, metadata) else exact, output or None, mesh=mesh)


def _only_these(rules: Mapping[str, str], exact: Mapping[str, str], metadata: ModelMetadata) -> bool:
    """Return True if the globs match the same parameters: ``*`` is any segment here, a number in a tp_plan."""
    patterns = [(Pattern(key), value) for key, value in rules.items()]
    names = [alias for tensor in metadata.tensors for alias in tensor.aliases]
    for name in names:
        values = {value for pattern, value in patterns if pattern.matches(name)}
        if values != ({exact[name]} if name in exact else set()):
            return False
    return True


def to_hf_tp_plan(plan: PlanContent, module: nn.Module | ModelMetadata, axis: str | None = None) -> dict[str, str]:
    """Derive generic module names and styles; see ``ShardingPlan.to_hf_tp_plan``."""
    resolution = resolve(plan, module)
    axis = the_axis(resolution, axis)
    problems = cut_elsewhere(resolution, axis, "a tp_plan") + sharder_problems(resolution, "a tp_plan")
    by_name: dict[str, dict[str, str]] = {}
    for path, tensors in tensors_by_module(resolution.metadata).items():
        style = _module_style(plan, path, tensors, resolution, axis, problems)
        by_name.setdefault(generic_name(path), {})[path] = style
    styles = {}
    for name, style_names in by_name.items():
        if len(set(style_names.values())) > 1:  # layers differ
            text = ", ".join(f"{path}: {style or 'whole'}" for path, style in style_names.items())
            problems.append(not_expressible(name, text, "a tp_plan has one style for all layer numbers"))
        elif "" not in style_names.values():
            styles[name] = next(iter(style_names.values()))
    styles |= _tied_styles(resolution, styles)
    raise_problems(problems, "a tp_plan cannot express this plan")
    return styles


def _module_style(
    plan: PlanContent, path: str, tensors: list[TensorMetadata], found: Resolution, axis: str, problems: list[Problem]
) -> str:
    """Return the style of the module's own parameters, ``""`` if they are replicated."""
    layouts = {tensor.name: found.layouts.get(tensor.name) for tensor in tensors}
    if all(cut_dim(layouts[tensor.name], tensor, axis) is None for tensor in tensors):
        return ""
    kind = found.metadata.modules.get(path, "")
    embedding = kind == "Embedding"
    candidates = ["embedding_rowwise", "embedding_colwise"] if embedding else ["colwise", "rowwise"]
    if kind == "Linear":
        candidates += ["packed_colwise", "packed_rowwise"]  # last: plain styles are preferred
    for style in candidates if embedding or kind == "Linear" else ():
        if all(_lies_as(style, layouts[tensor.name], tensor, axis) for tensor in tensors):
            try:
                output = output_of(plan, path, axis)
            except PlanError as error:
                problems.extend(error.problems)
                return ""
            if style == "colwise" and output == "whole":
                return "colwise_gather_output"
            if output is None or (output == "whole" and style in ("rowwise", *candidates[:2])):
                return style
            if style == "colwise" and output == "last":
                return style
            text = f"the output layout {output} of style {style}"
            problems.append(not_expressible(path, text, "leave the output layout out"))
            return ""
    text = ", ".join(f"{tensor.name.rsplit('.', 1)[-1]} {layouts[tensor.name]}" for tensor in tensors)
    hint = "styles shard a Linear's weight and bias by rows, its weight by columns, or an Embedding"
    problems.append(not_expressible(path, f"a {kind or 'module'} with {text}", hint, axis=axis))
    return ""


def _lies_as(style: str, layout: Layout | None, tensor: TensorMetadata, axis: str) -> bool:
    if layout is None or not tensor.shape:  # a Sharder's, or a scalar
        return False
    wanted = Layout(layout.mesh, {axis: _STYLES[style][min(len(tensor.shape), 2) - 1]})
    return not wanted.problems(tensor.shape) and layout.equivalent_to(wanted, tensor.shape)


def _tied_styles(found: Resolution, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles of modules with further names of tied tensors only: an embedding's rows are a head's rows."""
    same = {"embedding_rowwise": "colwise_gather_output", "colwise": "embedding_rowwise"}
    added = {}
    for tensor in found.metadata.parameters:
        style = styles.get(generic_name(tensor.name.rpartition(".")[0]))
        for alias in tensor.aliases[1:]:  # the first name has its style
            path = alias.rpartition(".")[0]
            if style is not None and generic_name(path) not in styles:
                other = same.get(style, style)
                added[generic_name(path)] = style if _same_kind(found, tensor, path) else other
    return added


def _same_kind(found: Resolution, tensor: TensorMetadata, path: str) -> bool:
    return found.metadata.modules.get(path) == found.metadata.modules.get(tensor.name.rpartition(".")[0])


def _key_of(name: str, styles: Mapping[str, str]) -> str | None:
    """Return the deciding entry of a parameter: its own, else that of its module."""
    if name in styles:
        return name
    owner = name.rpartition(".")[0]
    return owner if owner in styles else None


def _style_problems(styles: Mapping[str, Any], forward: str) -> list[Problem]:
    problems = []
    for key, style in styles.items():
        if not isinstance(style, str):
            hint = "a style is text, such as 'colwise'"
            problems.append(not_expressible(key, f"{style!r:.200} of type {type(style).__name__}", hint))
            continue
        if style in _STYLES or (style in _FORWARD_STYLES and forward == "drop"):
            continue
        if style in _FORWARD_STYLES:
            hint = "pass forward='drop' to take only the layout of its parameters"
            problems.append(not_expressible(key, f"style {style!r} changes what forward does", hint))
        else:
            reason = ", ".join((*_STYLES, *_FORWARD_STYLES))
            problems.append(not_expressible(key, f"style {style!r}", f"styles that can be read: {reason}"))
    return problems


def _unused(key: str) -> Problem:
    hint = "config.base_model_tp_plan is about the base model: pass prefix='model.'"
    return Problem("unmatched-pattern", key, found="no module or parameter has this name", hint=hint)
