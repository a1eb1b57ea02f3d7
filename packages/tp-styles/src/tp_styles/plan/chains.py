"""Layers of an `nn.Sequential` whose styles cannot follow one another: it calls its children in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles.problems import Problem

if TYPE_CHECKING:
    from tp_styles.plan.planned import PlannedModule

ELEMENTWISE = nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU
FULL = ("", 0)
"""State between two children: a full tensor; otherwise the layer whose shard arrives, and its global features."""


def chain_problems(
    modules: Mapping[str, nn.Module], planned: Mapping[str, PlannedModule], *, is_staged: bool
) -> Iterator[Problem]:
    """Problems of every `nn.Sequential`; in other modules the first call finds them.

    Args:
        modules: All modules by FQN.
        planned: Those with a style.
        is_staged: Another call may shard layers that have no style here.
    """
    for name, module in modules.items():
        if type(module).forward is nn.Sequential.forward:
            state: tuple[str, int] | None = None
            for key, child in module._modules.items():
                if child is not None:
                    state, problem = _next(f"{name}.{key}".lstrip("."), child, state, planned, is_staged)
                    if problem is not None:
                        yield problem


def _next(
    name: str,
    child: nn.Module,
    state: tuple[str, int] | None,
    planned: Mapping[str, PlannedModule],
    is_staged: bool,
) -> tuple[tuple[str, int] | None, Problem | None]:
    """The state after a child, None where it is not known, and what is wrong with its input."""
    if child._forward_pre_hooks or child._forward_hooks:
        return None, None
    if isinstance(child, ELEMENTWISE):
        return state, None
    if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
        return None, None
    if name not in planned:
        return (None, None) if is_staged else (FULL, _unpaired(name, child.in_features, state))
    spec = planned[name].spec
    if spec.compute not in ("column-linear", "row-linear") or spec.problems:
        return None, None
    ((_, enter),), (leave,) = spec.inputs, spec.outputs
    assert leave is not None
    problem = None
    if enter.src == Replicate():
        problem = _unpaired(name, child.in_features, state)
    elif enter.src == Shard(-1) and state == FULL:
        hint = "RowwiseParallel(input_layouts=Replicate()), or ColwiseParallel() for the layer before it"
        problem = Problem("unpaired", name, found="a row-wise layer whose input is full on every rank", hint=hint)
    elif enter.src == Shard(-1) and state is not None and state[1] != enter.width:
        hint = "a row-wise layer takes the features of the column-wise layer before it"
        found = f"it takes {enter.width} features, {state[0]!r} gives {state[1]}"
        problem = Problem("unpaired", name, found=found, hint=hint)
    if spec.local_output and leave.dst == Shard(-1):
        return (name, leave.width), problem
    return (FULL if spec.local_output and leave.dst == Replicate() else None), problem


def _unpaired(name: str, features: int, state: tuple[str, int] | None) -> Problem | None:
    if state is None or state == FULL:
        return None
    found = f"it takes {features} features, and each rank has its shard of the {state[1]} of {state[0]!r}"
    hint = f"RowwiseParallel() here, or ColwiseParallel(output_layouts=Replicate()) for {state[0]!r}"
    return Problem("unpaired", name, found=found, hint=hint)
