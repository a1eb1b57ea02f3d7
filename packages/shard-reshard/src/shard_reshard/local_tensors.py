"""The local tensors of a rank: one as itself, several as a list, and whether they are what a plan expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shard_reshard._torch_compat import PLAIN_TYPES, is_wrapper, waited_for
from shard_reshard.plan import ReshardPlan
from shard_reshard.problems import PlanError, Problem

Shards = torch.Tensor | Sequence[torch.Tensor] | None


def as_list(shards: Shards) -> list[torch.Tensor]:
    """Local tensors as a list, however few there are.

    Raises:
        PlanError: ``not-a-tensor``.
    """
    if shards is None:
        return []
    if isinstance(shards, torch.Tensor):
        return [shards if type(shards) in PLAIN_TYPES else waited_for(shards)]
    given: Any = shards  # whatever the caller has passed
    listed = list(given) if isinstance(given, Iterable) else [given]
    for value in listed:
        if not isinstance(value, torch.Tensor):
            hint = "pass a tensor, a list of tensors for several boxes, or None"
            raise PlanError(Problem("not-a-tensor", found=f"a {type(value).__qualname__}", hint=hint))
    return [value if type(value) in PLAIN_TYPES else waited_for(value) for value in listed]


def as_result(shapes: Sequence[object], tensors: Sequence[torch.Tensor]) -> Shards:
    """One tensor as itself, none as None, several as a list."""
    if len(shapes) == 1:
        return tensors[0]
    return list(tensors) if shapes else None


def local_problems(plan: ReshardPlan, rank: int, tensors: Sequence[torch.Tensor], side: str = "src") -> list[Problem]:
    """How the local tensors of ``rank`` differ from what the plan expects on ``side``."""
    shapes = plan.local_shapes(rank, side)
    dtype = plan.dtype if side == "src" else plan.out_dtype
    where = f"rank {rank}, {'source' if side == 'src' else 'out'}"
    if len(shapes) != len(tensors):
        found = f"{len(tensors)} local tensors, the layout has {len(shapes)}"
        return [Problem("local-count", where, found=found, hint=f"one tensor for each box, of shapes {shapes}")]
    problems = []
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        which = where if len(shapes) == 1 else f"{where} {number}"
        if tensor.is_nested:  # it has neither a shape nor strides to look at
            hint = "pass a padded tensor, or its values() by a plan of their own"
            problems.append(Problem("local-layout", which, found="a nested tensor", hint=hint))
            continue
        if tuple(tensor.shape) != shape:
            found = f"shape {tuple(tensor.shape)}, the layout of {plan.shape} says {shape}"
            hint = "pass the local tensor, and the global shape with shape="
            problems.append(Problem("local-shape", which, found=found, hint=hint))
        if str(tensor.dtype) != f"torch.{dtype}":
            found = f"{tensor.dtype}, the plan is for {dtype}"
            hint = "plan for this dtype, or pass dtype= to cast on the way"
            problems.append(Problem("local-dtype", which, found=found, hint=hint))
        if hasattr(tensor, "device_mesh"):
            hint = "pass its to_local(), or use redistribute()"
            problems.append(Problem("local-layout", which, found="a DTensor", hint=hint))
        elif type(tensor) not in PLAIN_TYPES and is_wrapper(tensor):
            found = f"a {type(tensor).__qualname__}, which wraps other tensors"
            hint = "pass the tensors that it wraps, each by a plan of its own"
            problems.append(Problem("local-layout", which, found=found, hint=hint))
        if tensor.is_meta:
            hint = "give it memory with values first: to_empty() and loading, or materialising it"
            problems.append(Problem("no-data", which, found="a tensor on the meta device", hint=hint))
        if tensor.layout != torch.strided:
            found = f"a {tensor.layout} tensor"
            problems.append(Problem("local-layout", which, found=found, hint="only dense tensors can be moved"))
    return problems
