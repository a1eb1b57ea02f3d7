"""The least modelled time of a step: `planner` solves the `model` of the `operations` that a `workload` passes."""

from shard_spec.planners.optimal.model import StepModel
from shard_spec.planners.optimal.operations import Operation, Structure, structure_of
from shard_spec.planners.optimal.planner import OptimalPlanner, Price
from shard_spec.planners.optimal.workload import Workload

__all__ = ["OptimalPlanner", "Workload", "Price", "StepModel", "Operation", "Structure", "structure_of"]
