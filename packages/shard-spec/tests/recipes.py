"""Hand-written plans under the cost model of `OptimalPlanner`: what its answers are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard_spec.optimal import OptimalPlanner
from shard_spec.optimal.model import Operation, StepModel
from torch import nn

# Data: batch cut, weights replicated. FSDP: batch and weights cut. Megatron: columns and rows, with the stream
# replicated, or cut along the sequence between blocks. Names of strategies in order of preference.
RECIPES: dict[str, tuple[str, ...]] = {
    "data": ("batch", "whole"),
    "fsdp": ("batch+fsdp", "fsdp", "batch"),
    "megatron": ("column", "row", "vocabulary", "heads", "whole"),
    "megatron+sequence": ("column", "row", "vocabulary", "heads", "sequence", "whole"),
}


@dataclass(frozen=True)
class PlanCost:
    """Cost of one plan in the model."""

    seconds: float
    memory_bytes: int
    choices: tuple[tuple[str, str], ...]


def price(planner: OptimalPlanner, module: nn.Module, recipe: Mapping[str, str]) -> PlanCost:
    """The cost of a recipe: axis to a name in `RECIPES`; ValueError where a size does not divide."""
    model = planner.model(module)
    chosen = assignment(model, recipe)
    return PlanCost(model.problem.evaluate(chosen), model.problem.memory_of(chosen), model.words(chosen))


def assignment(model: StepModel, recipe: Mapping[str, str]) -> tuple[int, ...]:
    """The strategies of a recipe, as positions in `model.choices`."""
    chosen = []
    for operation, choices in zip(model.operations, model.choices, strict=True):
        names = [_first_of(RECIPES[recipe[axis]], operation) for axis in model.mesh.axis_names]
        matching = [at for at, ways in enumerate(choices) if [way.name for way in ways] == names]
        if not matching:
            raise ValueError(f"{operation.name} cannot be {' x '.join(names)}: its sizes do not divide.")
        chosen.append(matching[0])
    return tuple(chosen)


def _first_of(names: tuple[str, ...], operation: Operation) -> str:
    have = {strategy.name for strategy in operation.strategies}
    return next(name for name in names if name in have)
