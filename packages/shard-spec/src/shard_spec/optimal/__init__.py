"""Plans of least modelled time: one strategy for each operation and tensor, optimised jointly and exactly.

`planner` has the public class; `model` prices the `operations` of a workload. The solvers are independent of tensors:
`problem` is a sum of costs of nodes and pairs with its exact minimisation, `memory_cap` adds one inequality.
"""

from shard_spec.optimal.model import StepModel, Workload
from shard_spec.optimal.operations import Operation, Structure, structure_of
from shard_spec.optimal.planner import OptimalPlanner, PlanCost
from shard_spec.optimal.problem import (
    CappedSolution,
    InfeasibleError,
    PairwiseBuilder,
    PairwiseProblem,
    Solution,
    least_memory,
    solve_capped,
    solve_exact,
)

__all__ = [
    "OptimalPlanner",
    "Workload",
    "PlanCost",
    "StepModel",
    "Operation",
    "Structure",
    "structure_of",
    "PairwiseProblem",
    "PairwiseBuilder",
    "Solution",
    "solve_exact",
    "solve_capped",
    "CappedSolution",
    "InfeasibleError",
    "least_memory",
]
