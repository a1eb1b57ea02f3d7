"""Validation: everything that keeps a plan from being carried out."""

from __future__ import annotations

from math import prod

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import Cell, ShardMap
from shard_reshard.layout.dtypes import FLOATING
from shard_reshard.plan.plan import Plan

# What torch has no kernels for; found here, because a rank that finds it while it reduces leaves the others waiting.
_NOT_REDUCED = {
    **{name: {"sum", "min", "max"} for name in ("uint16", "uint32", "uint64")},
    "complex32": {"avg"},
    "float4_e2m1fn_x2": {"sum", "avg", "min", "max", "product"},
}


def _has(src: ShardMap, wanted: Cell) -> bool:
    """Return True where the cells of a source, which do not overlap, fill a cell of the destination."""
    found = sum(_size(cell) for cell in src.cross(wanted.start, wanted.stop))
    return found == _size(wanted)


def _size(cell: Cell) -> int:
    return prod(stop - start for start, stop in zip(cell.start, cell.stop, strict=True))


def check_plan(plan: Plan) -> None:
    """Raise everything that keeps a plan from being carried out."""
    problems = []
    ops = () if plan.is_identity else plan.src.reduce_ops
    if plan.src.holes and not all(_has(plan.src, cell) for cell in plan.dst.cells()):
        hint = "only a destination may leave elements out"
        problems.append(Problem("boxes-incomplete", "src", found="elements that no rank has", hint=hint))
    if len(set(ops)) > 1 and not set(ops) <= {"sum", "avg"}:
        hint = "reduce one axis after the other: redistribute to a layout that keeps one of them first"
        problems.append(Problem("unsupported-dtype", "src", found=f"partial axes of {', '.join(ops)}", hint=hint))
    if ("avg" in ops and plan.dtype not in FLOATING) or (ops and plan.dtype == "bool"):
        hint = "reduce in a floating dtype, or sum"
        problems.append(Problem("unsupported-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    if plan.dtype in _NOT_REDUCED and set(ops) & _NOT_REDUCED[plan.dtype]:
        hint = "convert it before, to a dtype that torch can add and compare"
        problems.append(Problem("unsupported-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    if ops and plan.dtype.startswith("complex") and set(ops) & {"min", "max"}:
        hint = "complex numbers have no order"
        problems.append(Problem("unsupported-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    pending = () if plan.is_identity else plan.dst.reduce_ops
    if len({"sum", "product"} & set(pending)) == 2 or ({"sum", "product"} & set(pending) and len(set(pending)) > 1):
        hint = "make all partial axes of the destination one op"
        problems.append(Problem("unsupported-dtype", "dst", found=f"partial axes of {', '.join(pending)}", hint=hint))
    if plan.dtype.startswith("complex") and not plan.out_dtype.startswith("complex"):
        hint = "take the real part before"
        problems.append(Problem("dtype-mismatch", "dtype", found=f"{plan.dtype} to {plan.out_dtype}", hint=hint))
    if "float4_e2m1fn_x2" in (plan.dtype, plan.out_dtype) and plan.dtype != plan.out_dtype:
        hint = "packed pairs of numbers move as they are"
        problems.append(Problem("unsupported-dtype", "dtype", found=f"{plan.dtype} to {plan.out_dtype}", hint=hint))
    if plan.max_workspace_bytes is not None and plan.max_workspace_bytes < 1:
        found = f"max_workspace_bytes={plan.max_workspace_bytes}"
        problems.append(
            Problem("invalid-argument", "max_workspace_bytes", found=found, hint="at least one byte, or None")
        )
    if problems:
        raise PlanError(problems)
