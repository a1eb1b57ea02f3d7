"""Layouts of parameters become styles (extra `[shard-spec]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles.problems import PlanError, Problem
from tp_styles.spec import describe
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.gqa import QUERY_HEADS, LocalHeads
from tp_styles.styles.layers import LinearShape, linear_shape
from tp_styles.styles.replicated import NoParallel
from tp_styles.styles.rowwise import RowwiseParallel

if TYPE_CHECKING:
    from shard_spec import ShardingPlan


def from_sharding_plan(plan: ShardingPlan, module: nn.Module, *, axis: str = "tp") -> dict[str, ParallelStyle]:
    """Styles that lay out a module's parameters as a `shard_spec.ShardingPlan` says, for one axis of its mesh.

    A linear layer whose rows are cut becomes column-wise, one whose columns are cut row-wise; a cut embedding likewise.
    Where a block has both, the activation between them stays a shard; otherwise each layer takes and gives whole
    activations, so that every layer is right on its own.

    Args:
        plan: The plan; its other axes are other packages' matter.
        module: The model.
        axis: Name of the tensor-parallel axis.

    Returns:
        FQN -> style, for `apply_plan`; layers that the axis does not cut are not in it.

    Raises:
        PlanError: Layouts that no style has a meaning for, all of them at once.
    """
    layouts: dict[str, Any] = dict(plan.resolve(module).parameters)
    cuts = {name: _on_axis(layout, axis) for name, layout in layouts.items()}
    if layouts and not any(axis in layout.mesh.axis_names for layout in layouts.values()):
        raise PlanError(Problem("no-such-axis", axis=axis, found="no layout on a mesh with it", hint="pass axis="))
    # A tied parameter is listed once: its other names get the same cut.
    by_object = {id(module.get_parameter(name)): cut for name, cut in cuts.items()}
    cuts = {name: by_object.get(id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)}
    problems: list[Problem] = []
    roles = {
        name: _role(name, child, cuts, problems)
        for name, child in module.named_modules(remove_duplicate=False)
        if any(cuts.get(_below(name, key)) is not None for key in child._parameters)
    }
    if problems:
        raise PlanError(problems, "the plan has layouts that no style has a meaning for:")
    styles = {name: _style(name, role, cuts, roles) for name, role in roles.items() if role is not None}
    styles |= {name: LocalHeads() for name in _attention(module, roles) if name not in styles}
    return styles | {name: NoParallel(sum_gradient=True) for name in _inside(module, roles) if name not in styles}


def _inside(module: nn.Module, roles: dict[str, str | None]) -> list[str]:
    """Whole modules between a block's column-wise and row-wise layers: norms of heads, learned activations.

    They are told from those before and after the block by their size, which is that of neither of its ends.
    """
    found = []
    for name, child in module.named_modules():
        layers = {key: (roles.get(_below(name, key)), below) for key, below in child.named_children()}
        ends = {
            size
            for role, below in layers.values()
            if role in ("column", "row") and (shape := linear_shape(describe(below))) is not None
            for size in ((shape.in_features,) if role == "column" else (shape.out_features,))
        }
        if {"column", "row"} <= {role for role, _ in layers.values()}:
            found += [
                _below(name, key)
                for key, (role, below) in layers.items()
                if role is None and (sizes := [p.numel() for p in below.parameters()]) and not ends & set(sizes)
                if not any(other.startswith(_below(name, key) + ".") for other in roles)
            ]
    return found


def _attention(module: nn.Module, roles: dict[str, str | None]) -> list[str]:
    """Modules with head counts and with layers of both roles right below."""
    found = []
    for name, child in module.named_modules():
        below = {roles.get(_below(name, key)) for key, _ in child.named_children()}
        if {"column", "row"} <= below and any(isinstance(vars(child).get(key), int) for key in QUERY_HEADS):
            found.append(name)
    return found


def _on_axis(layout: Any, axis: str) -> Any:
    """The placement on the axis; None for whole on every rank."""
    if axis not in layout.mesh.axis_names:
        return None
    placement = layout.placements[layout.mesh.axis_names.index(axis)]
    return None if isinstance(placement, Replicate) else placement


def _role(name: str, module: nn.Module, cuts: dict[str, Any], problems: list[Problem]) -> str | None:
    """`"column"` or `"row"` for a linear layer, `"rows"` or `"columns"` for an embedding."""
    weight, bias = cuts.get(_below(name, "weight")), cuts.get(_below(name, "bias"))
    dim = getattr(weight, "dim", None)
    shape = linear_shape(describe(module, name))
    if dim is not None and dim < 0 and isinstance(module.weight, nn.Parameter):
        dim += module.weight.dim()
    if shape is not None and dim is not None:
        return _linear_role(name, module, dim, shape, weight, bias, problems)
    if isinstance(module, nn.Embedding) and isinstance(weight, Shard):
        return "rows" if dim == 0 else "columns"
    found = {key: str(cuts.get(_below(name, key))) for key in module._parameters if cuts.get(_below(name, key))}
    problems.append(
        Problem(
            "no-style",
            name,
            found=f"{type(module).__name__} with {found}",
            hint="styles cut nn.Linear and nn.Embedding weights; keep this one whole on the axis",
        )
    )
    return None


def _linear_role(
    name: str, module: nn.Module, dim: int, shape: LinearShape, weight: Any, bias: Any, problems: list[Problem]
) -> str | None:
    column = dim == shape.out_dim
    if module._parameters.get("bias") is not None and (bias is not None) != column:
        problems.append(
            Problem(
                "bias-layout",
                _below(name, "bias"),
                found=str(bias or "whole"),
                hint="cut the bias with the rows of its weight, and keep it whole with the columns",
            )
        )
    if not column and not isinstance(weight, Shard):
        problems.append(
            Problem("no-style", _below(name, "weight"), found=str(weight), hint="columns are cut as one: Shard(dim)")
        )
    if column and bias is not None and _sections(bias) != _sections(weight):
        problems.append(
            Problem("bias-layout", _below(name, "bias"), found=f"{bias} and {weight}", hint="cut both alike")
        )
    if column and not isinstance(weight, Shard) and _sections(weight) is None:
        problems.append(
            Problem("no-style", _below(name, "weight"), found=str(weight), hint="Shard, or sections of equal treatment")
        )
    return "column" if column else "row"


def _sections(placement: Any) -> int | tuple[int, ...] | None:
    """The sections of an interleaved shard."""
    found: int | tuple[int, ...] | None = getattr(placement, "sections", None)
    return found


def _style(name: str, role: str, cuts: dict[str, Any], roles: dict[str, str | None]) -> ParallelStyle:
    parent = name.rpartition(".")[0]
    siblings = {other for key, other in roles.items() if key.rpartition(".")[0] == parent}
    sections = _sections(cuts.get(_below(name, "weight")))
    inner = "row" in siblings and "column" in siblings
    if role == "column":
        output = Shard(-1) if inner else Replicate()
        if sections is not None:
            return FusedColwiseParallel(sections, output_layouts=output)
        return ColwiseParallel(output_layouts=output)
    if role == "row":
        return RowwiseParallel(input_layouts=Shard(-1) if inner else Replicate())
    return RowwiseParallel() if role == "rows" else ColwiseParallel(output_layouts=Replicate())


def _below(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
