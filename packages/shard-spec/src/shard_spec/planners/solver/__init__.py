"""Choosing one strategy per node when nodes and pairs of nodes have costs: exact, with a memory cap, and by HiGHS.

`problem` says what is to be minimised, `elimination` does so exactly, `memory_cap` adds one inequality and proves how
far from the optimum it stopped, `highs` asks a mixed-integer solver for a second opinion.
"""

from shard_spec.planners.solver.elimination import solve_exact
from shard_spec.planners.solver.highs import HighsAnswer, solve_highs
from shard_spec.planners.solver.memory_cap import CappedSolution, InfeasibleError, least_memory, solve_capped
from shard_spec.planners.solver.problem import PairwiseBuilder, PairwiseProblem, Solution

__all__ = [
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
