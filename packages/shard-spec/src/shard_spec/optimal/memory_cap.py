"""Pairwise problems with a memory limit, solved with a proven optimality bound.

Charge a price per byte and drop the inequality (Lagrangian relaxation). For any price the exact optimum of the charged
problem, minus price times limit, is a lower bound. Two solutions enclose the best price: one over the limit, one
within. Each as a function of the price is a line; the next price is their intersection, and the exact solution there
replaces one of the two (Handler and Zang, Networks 10, 1980). The search ends if no solution lies below both lines, or
if solution and bound are close. Equal layers all change at one price, so the last two solutions are mixed: one for the
first nodes, the other for the rest. The rest between solution and bound is the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from shard_spec._shared.page import human_bytes
from shard_spec.optimal.problem import QUANTUM, Eliminator, PairwiseProblem, Solution

_CLOSE = 1e-3  # relative gap; more prices gain little


class InfeasibleError(ValueError):
    """No assignment is within the limit; `least_bytes` is the minimum (-1: no assignment is allowed at all)."""

    def __init__(self, least_bytes: int, limit: int) -> None:
        self.least_bytes, self.limit = least_bytes, limit
        super().__init__(f"the smallest assignment needs {human_bytes(least_bytes)}, the limit is {human_bytes(limit)}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.least_bytes, self.limit)


@dataclass(frozen=True)
class CappedSolution(Solution):
    """An assignment within the limit, and a lower bound on any such cost."""

    lower_bound: float

    @property
    def gap(self) -> float:
        """``(objective - lower_bound) / objective``; 0 when proven optimal."""
        return max(0.0, self.objective - self.lower_bound) / (abs(self.objective) or 1.0)


def solve_capped(problem: PairwiseProblem, limit: int) -> CappedSolution:
    """Minimise cost within `limit` bytes, as far as one price per byte can.

    Raises:
        InfeasibleError: no assignment is within the limit.
    """
    least = least_memory(problem)
    if least.objective > limit:
        raise InfeasibleError(-1 if math.isinf(least.objective) else int(least.objective), limit)
    eliminator = Eliminator(problem)
    large = eliminator.solve()  # the optimum without a limit
    if problem.memory_of(large.assignment) <= limit:
        return CappedSolution(large.assignment, large.objective, large.objective)
    small = Solution(least.assignment, problem.evaluate(least.assignment))
    best, bound = small, large.objective  # no cap: a lower bound
    while True:
        fewer = problem.memory_of(large.assignment) - problem.memory_of(small.assignment)
        price = (small.objective - large.objective) / fewer  # equal charged cost of both
        # Rounded down to the quantum: sums stay exact, and the bound stays a bound.
        charges = [torch.floor(amount.double() * price / QUANTUM) * QUANTUM for amount in problem.memory]
        answer = eliminator.solve(charges)
        charged = _charged(answer, charges)
        bound = max(bound, _rounded_down(charged - Fraction(price) * limit))
        if (
            min(_charged(large, charges), _charged(small, charges)) <= charged
            or best.objective - bound <= _CLOSE * bound
        ):
            best = min([best, *_mixed(problem, limit, large, small)], key=lambda each: each.objective)
            return CappedSolution(best.assignment, best.objective, min(bound, best.objective))
        if problem.memory_of(answer.assignment) > limit:  # keep one solution on each side of the limit
            large = answer
        else:
            small = answer
            best = min(best, answer, key=lambda each: each.objective)


def _mixed(problem: PairwiseProblem, limit: int, large: Solution, small: Solution) -> list[Solution]:
    """Mix both solutions, one for the first nodes, as close to the limit as possible."""
    mixtures = []
    for one, other in ((large, small), (small, large)):
        first, rest = (
            torch.tensor([int(amount[choice]) for amount, choice in zip(problem.memory, each.assignment, strict=True)])
            for each in (one, other)
        )
        totals = first.cumsum(0) + rest.sum() - rest.cumsum(0)  # bytes with `one` up to this node
        at = int(torch.where(totals <= limit, totals, -1).argmax()) + 1  # most bytes within the limit
        assignment = one.assignment[:at] + other.assignment[at:]
        if int(totals[at - 1]) <= limit:
            mixtures.append(Solution(assignment, problem.evaluate(assignment)))
    return mixtures


def least_memory(problem: PairwiseProblem) -> Solution:
    """Return the allowed assignment with the fewest bytes as its objective (infinity: none is allowed)."""
    memory = problem.memory or tuple(torch.zeros(cost.shape, dtype=torch.int64) for cost in problem.costs)
    only_memory = PairwiseProblem(
        problem.names,
        tuple(
            torch.where(torch.isinf(cost), torch.inf, amount.double())  # forbidden stays forbidden
            for cost, amount in zip(problem.costs, memory, strict=True)
        ),
        problem.edges,
        tuple(torch.where(torch.isinf(matrix), torch.inf, 0.0).double() for matrix in problem.edge_costs),
    )
    return Eliminator(only_memory).solve()


def _charged(solution: Solution, charges: Sequence[torch.Tensor]) -> Fraction:
    """Sum cost and charges of an assignment exactly: the search ends by comparing such sums."""
    return Fraction(solution.objective) + sum(
        Fraction(float(charge[choice])) for charge, choice in zip(charges, solution.assignment, strict=True)
    )


def _rounded_down(value: Fraction) -> float:
    number = float(value)  # nearest: may be above
    return number if Fraction(number) <= value else math.nextafter(number, -math.inf)
