"""Run a small model with its weights and report units whose slices mix: the referee of the planner's recognisers.

A rank's result is the model's output with the other ranks' rows set to zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from shard_spec import Layout, MeshSpec, Problem
from shard_spec.planners.megatron.blocks import Cut, TPBlock
from shard_spec.planners.modules.block_simulator import BlockSimulator, Channels
from torch import Tensor, nn


def verify_units(
    module: nn.Module, units: tuple[TPBlock, ...], tp_size: int, call: Callable[[nn.Module], Tensor]
) -> tuple[Problem, ...]:
    """Report every unit with summands that mix slices, or that the call does not exercise; empty if none.

    Use a small model with random weights, in float64 if possible: it runs once per unit and rank, and a few times
    more.

    Args:
        module: the model, materialised; it is not changed.
        units: `MegatronPlanner.analyse(module).units`; vocabulary units have no region and are skipped.
        tp_size: number of tensor-parallel ranks.
        call: runs a model and returns one output tensor; deterministic (dropout off).
    """
    blocks = [unit for unit in units if unit.rows and unit.columns]
    twin = copy.deepcopy(module)  # weights change during the test
    parameters = dict(twin.named_parameters(remove_duplicate=False))

    def channels(cuts: Iterable[Cut]) -> list[Channels]:
        return [Channels(value, _masks(value, cut, tp_size)) for cut in cuts for value in [parameters[cut.name].data]]

    rows = [(row, row.value.clone()) for unit in blocks for row in channels(unit.rows)]

    def run(rank: int) -> Tensor:
        for row, value in rows:
            row.value.copy_(value * row.owned[rank])  # keep the rank's summands only
        return call(twin)

    problems: list[Problem] = []
    columns = {unit.name: channels((*unit.columns, *unit.inner)) for unit in blocks}
    with torch.no_grad():
        tolerance = 1e-9 if call(twin).dtype == torch.float64 else 1e-4  # relative rounding of a full forward
        simulator = BlockSimulator(run, columns, tolerance)
        for rank in range(tp_size):
            for name, by in simulator.mixing(rank).items():
                reason = f"rank {rank} of {tp_size} needs other ranks' channels (output moves by {by:.2g})"
                problems.append(Problem("slices-mix", name, found=reason, hint="do not shard this block"))
            reason = f"the output does not depend on rank {rank}'s slice"
            hint = "pass a call that runs this block on inputs that matter"
            problems += [Problem("unverified", name, found=reason, hint=hint) for name in simulator.idle(rank)]
    return tuple(problems)


def _masks(value: Tensor, cut: Cut, tp_size: int) -> list[Tensor]:
    """Return a mask for each rank, True at its entries."""
    layout = Layout(MeshSpec({"tp": tp_size}), {"tp": cut.placement})
    masks = [torch.zeros(value.shape, dtype=torch.bool, device=value.device) for _ in range(tp_size)]
    for rank, mask in enumerate(masks):
        for box in layout.boxes(rank, tuple(value.shape)):
            mask[box.slices()] = True
    return masks
