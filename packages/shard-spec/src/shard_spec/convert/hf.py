"""Hugging Face's ``tp_plan``s, written for transformers 5.23.

A ``tp_plan`` maps module names, with ``*`` for layer numbers, to the names of styles. It fixes two things at once:
layouts of parameters and the behaviour of forward. A sharding plan fixes the first. Styles with a forward beyond their
parameters' layout cannot be expressed and are refused by name, unless ``forward="drop"`` is passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.convert.parallelize import (
    STYLES,
    cut_elsewhere,
    not_expressible,
    sharder_problems,
    style_of_module,
    tensors_by_module,
)
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import REPLICATE, PlacementSpec, ShardSpec
from shard_spec.plan.content import PlanContent
from shard_spec.plan.globs import glob_rules
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata, metadata_of
from shard_spec.plan.resolve import Resolution, resolve

if TYPE_CHECKING:
    from torch import nn


_STYLES: dict[str, tuple[PlacementSpec, PlacementSpec]] = {
    **STYLES,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), STYLES["colwise"]),
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
    values: dict[str, str | None] = {}  # by each name: those of one tensor may differ, which validate() reports
    for tensor in metadata.parameters:
        for alias in tensor.aliases:
            key = _key_of(generic_name(alias), styles)
            values[alias] = None
            if key is None:
                continue
            used.add(key)  # unused entries are errors
            spec = {**_STYLES, **_FORWARD_STYLES}[styles[key]][min(len(tensor.shape), 2) - 1]  # by number of dims
            values[alias] = str(Layout(mesh, {axis: spec}))
    output = {}
    generic = {path: generic_name(path) for path in metadata.modules}
    for path, name in generic.items():
        if styles.get(name) in _GATHERS:
            output[path] = str(Layout.replicated(mesh))  # forward gathers the output
    used |= {key for key in styles if key in generic.values()}
    raise_problems([_unused(key) for key in styles if key not in used], "the tp_plan does not fit the model")
    buffers = [alias for tensor in metadata.buffers for alias in tensor.aliases]
    return PlanContent(glob_rules(values, (), buffers), output or None, mesh=mesh)


def to_hf_tp_plan(plan: PlanContent, module: nn.Module | ModelMetadata, axis: str = "tp") -> dict[str, str]:
    """Derive generic module names and styles; see ``ShardingPlan.to_hf_tp_plan``."""
    resolution = resolve(plan, module)
    resolution.one_mesh.axis_index(axis)  # raises for an unknown axis
    problems = cut_elsewhere(resolution, axis, "a tp_plan") + sharder_problems(resolution, "a tp_plan")
    by_name: dict[str, dict[str, str]] = {}
    for path, tensors in tensors_by_module(resolution.metadata).items():
        try:
            style = _module_style(plan, path, tensors, resolution, axis)
        except PlanError as error:
            problems.extend(error.problems)
            style = ""
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


def _module_style(plan: PlanContent, path: str, tensors: list[TensorMetadata], found: Resolution, axis: str) -> str:
    """Return the style of the module's own parameters, ``""`` if they are replicated."""
    style_and_output = style_of_module(plan, path, tensors, found, axis, packed=True)
    if style_and_output is None:
        return ""
    style, output = style_and_output
    if style == "colwise" and output == "whole":
        return "colwise_gather_output"
    by_itself = {"colwise": "last", "rowwise": "whole", "embedding_rowwise": "whole", "embedding_colwise": "whole"}
    if output in (None, by_itself.get(style)):
        return style
    text = f"the output layout {output} of style {style}"
    raise PlanError(not_expressible(path, text, "leave the output layout out"))


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
