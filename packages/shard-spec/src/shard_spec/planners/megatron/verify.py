"""Executes a model to check that its units may be cut as planned.

For each unit and rank, the rows' weights are set to zero outside of the rank's slice: what remains is the rank's
summand. Then the columns outside of its slice are replaced by other numbers. If the model's output moves, the rank's
summand needs channels that the rank does not have, and training with the plan would be wrong. Everything is done on
one process, on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shard_spec.layout import Layout
from shard_spec.mesh import MeshSpec
from shard_spec.planners.megatron.units import Cut, Unit
from shard_spec.problems import Problem


def verify_units(
    module: nn.Module, units: tuple[Unit, ...], tp_size: int, call: Callable[[nn.Module], Tensor]
) -> tuple[Problem, ...]:
    """Every unit whose summands mix slices, or that the call does not exercise; empty if all is well.

    Use a small model with random weights, in float64 if you can: two model runs per unit and rank, and one more.

    Args:
        module: the model, materialised; it is not changed.
        units: what `MegatronPlanner.analyse(module)` found.
        tp_size: number of tensor-parallel ranks.
        call: runs a model and returns one output tensor; deterministic (dropout off).
    """
    twin = copy.deepcopy(module)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    problems = []
    for unit in units:
        if not unit.rows or not unit.columns:
            continue  # vocabulary: rows of a table, nothing between
        for rank in range(tp_size):
            problem = _verify(unit, rank, tp_size, parameters, lambda: call(twin))
            if problem is not None:
                problems.append(problem)
    return tuple(problems)


def _verify(
    unit: Unit, rank: int, tp_size: int, parameters: Mapping[str, nn.Parameter], run: Callable[[], Tensor]
) -> Problem | None:
    rows = {cut.name: _mask(cut, parameters[cut.name], rank, tp_size) for cut in unit.rows}
    columns = {cut.name: _mask(cut, parameters[cut.name], rank, tp_size) for cut in (*unit.columns, *unit.inner)}
    kept = {name: parameters[name].detach().clone() for name in (*rows, *columns)}
    with torch.no_grad():
        try:
            for name, mask in rows.items():
                parameters[name].mul_(mask)
            alone = run()
            for name, mask in columns.items():
                parameters[name].copy_(torch.where(mask, kept[name], _other(kept[name])))
            without_others = run()
            for name in columns:
                parameters[name].copy_(_other(kept[name]))
            moved = run()
        finally:
            for name, value in kept.items():
                parameters[name].copy_(value)
    if not _same(alone, without_others):
        moved_by = f"{_distance(alone, without_others):.2g}"
        found = f"rank {rank} of {tp_size} needs other ranks' channels (output moves by {moved_by})"
        return Problem("slices-mix", unit.name, found=found, hint="do not cut this block")
    if _same(without_others, moved):
        return Problem(
            "not-exercised",
            unit.name,
            found=f"the output does not depend on rank {rank}'s slice",
            hint="pass a call that runs this block on inputs that matter",
        )
    return None


def _mask(cut: Cut, parameter: nn.Parameter, rank: int, tp_size: int) -> Tensor:
    """True where `rank` holds the parameter."""
    layout = Layout(MeshSpec({"tp": tp_size}), {"tp": cut.placement})
    mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
    for box in layout.boxes(rank, tuple(parameter.shape)):
        mask[box.slices()] = True
    return mask


def _other(value: Tensor) -> Tensor:
    """Numbers of the same size that are not `value`."""
    generator = torch.Generator().manual_seed(value.numel())
    scale = float(value.abs().mean()) or 0.02
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * scale * 3
    return value + noise.to(value.dtype).to(value.device)


def _same(one: Tensor, other: Tensor) -> bool:
    return _distance(one, other) <= (1e-9 if one.dtype == torch.float64 else 1e-4)


def _distance(one: Tensor, other: Tensor) -> float:
    """Greatest difference, as a share of the greatest value."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
