"""Cut layers that are part of no region: each right on its own, between whole activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from tp_styles.from_plan.axis_shards import AxisCuts
from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.layers import linear_shape
from tp_styles.styles.rowwise import RowwiseParallel
from tp_styles.values.spec import describe
from tp_styles.values.split import Split


def no_region(cuts: AxisCuts, name: str, keys: set[str]) -> Problem:
    """The error for a layer that is part of no region."""
    found = ", ".join(f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys))
    hint = (
        "it is part of no recognised block that the plan cuts by columns and rows. For a data-parallel axis use "
        'FSDP or shard_spec.apply_plan; for a tensor-parallel one unproven="gather" makes it right on its own'
    )
    return Problem("unknown-name", name, axis=cuts.axis, found=found, hint=hint)


def gathering(
    cuts: AxisCuts, name: str, module: nn.Module, keys: set[str]
) -> tuple[ParallelStyle | None, Problem | None]:
    """The style that makes the layer right between whole activations; or why there is none."""
    info = describe(module, name)
    weight, bias = (cuts.splits.get(below(name, key)) for key in ("weight", "bias"))
    shape = linear_shape(info)
    if shape is not None and weight is not None:
        by_rows = weight.dim == shape.out_dim
        has_bias = module._parameters.get("bias") is not None
        if has_bias and (not cuts.agree(below(name, "bias"), replace(weight, dim=0)) if by_rows else bias):
            hint = "cut the bias with the rows of its weight, and keep it whole with the columns"
            return None, Problem("layout-mismatch", below(name, "bias"), found=str(bias or "whole"), hint=hint)
        if by_rows:
            return column(replace(weight, dim=0), Replicate()), None
        if weight.is_single and all(section.unit == 1 for section in weight.sections):
            return RowwiseParallel(input_layouts=Replicate()), None
    if isinstance(module, nn.Embedding) and weight is not None and weight.is_single:
        by_rows = weight.dim == 0
        return RowwiseParallel() if by_rows else ColwiseParallel(output_layouts=Replicate()), None
    found = f"{type(module).__name__} with " + ", ".join(
        f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys)
    )
    hint = "styles cut nn.Linear and nn.Embedding weights; keep this one whole on the axis"
    return None, Problem("layout-mismatch", name, axis=cuts.axis, found=found, hint=hint)


def column(split: Split, output: Any) -> ParallelStyle:
    """The column-wise style that divides output features so."""
    if len(split.sections) == 1 and split.sections[0].unit == 1:
        return ColwiseParallel(output_layouts=output)
    return FusedColwiseParallel(
        tuple(s.size for s in split.sections), unit=tuple(s.unit for s in split.sections), output_layouts=output
    )


def below(name: str, attribute: str) -> str:
    """FQN of something of a module."""
    return f"{name}.{attribute}" if name else attribute
