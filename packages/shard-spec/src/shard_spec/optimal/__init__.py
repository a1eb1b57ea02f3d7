"""Plans of least modelled time: one strategy for each operation and tensor, chosen together and exactly.

`planner` is the public class; `model` prices the `operations` that a `workload` passes. The solvers know nothing of
tensors: `problem` is a sum of costs of nodes and pairs, `elimination` minimises it exactly, `memory_cap` adds one
inequality and proves how far from the optimum it stopped, `highs` asks a mixed-integer solver for a second opinion.
"""

from shard_spec.optimal.highs import HighsAnswer, solve_highs
from shard_spec.optimal.memory_cap import CappedSolution, InfeasibleError, least_memory, solve_capped
from shard_spec.optimal.model import StepModel, Workload
from shard_spec.optimal.operations import Operation, Structure, structure_of
from shard_spec.optimal.planner import OptimalPlanner, PlanCost
from shard_spec.optimal.problem import PairwiseBuilder, PairwiseProblem, Solution, solve_exact

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
    "solve_highs",
    "HighsAnswer",
]
