"""The pairwise model with one inequality: total memory at most a limit, with a bound that says how good the answer is.

Charge a price per byte and drop the inequality (Lagrangian relaxation). For any price the exact optimum of the charged
problem, minus price times limit, is a lower bound. Two answers enclose the best price: one that is too large, one that
fits. Each as a function of the price is a line; the next price is where the lines meet, and the exact answer there
replaces one of the two (Handler and Zang, Networks 10, 1980). It ends where no answer lies below both lines, or where
answer and bound are close. Equal layers change at one price all together; so the last two answers are mixed, one on the
first nodes, the other on the rest. What is left between answer and bound is the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from shard_spec.optimal.problem import QUANTUM, Eliminator, PairwiseProblem, Solution

_CLOSE = 1e-3  # further prices cannot prove much more


class InfeasibleError(ValueError):
    """No assignment keeps the limit. `least_bytes` is what the smallest one needs (-1: none is allowed at all)."""

    def __init__(self, least_bytes: int, limit: int) -> None:
        self.least_bytes, self.limit = least_bytes, limit
        super().__init__(f"the smallest assignment needs {least_bytes:,} bytes, the limit is {limit:,}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.least_bytes, self.limit)


@dataclass(frozen=True)
class CappedSolution(Solution):
    """An assignment that keeps the limit, and the lower bound that no such assignment undercuts."""

    lower_bound: float

    @property
    def gap(self) -> float:
        """``(objective - lower_bound) / objective``; 0 when proven optimal."""
        return max(0.0, self.objective - self.lower_bound) / (abs(self.objective) or 1.0)


def solve_capped(problem: PairwiseProblem, limit: int) -> CappedSolution:
    """Minimise cost with total memory of at most `limit` bytes, as far as one price per byte can.

    Raises:
        InfeasibleError: no assignment keeps the limit.
    """
    least = least_memory(problem)
    if least.objective > limit:
        raise InfeasibleError(-1 if math.isinf(least.objective) else int(least.objective), limit)
    eliminator = Eliminator(problem)
    large = eliminator.solve()
    if problem.memory_of(large.assignment) <= limit:
        return CappedSolution(large.assignment, large.objective, large.objective)
    small = Solution(least.assignment, problem.evaluate(least.assignment))
    best, bound = small, large.objective
    while True:
        fewer = problem.memory_of(large.assignment) - problem.memory_of(small.assignment)
        price = (small.objective - large.objective) / fewer  # where both cost the same
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
        if problem.memory_of(answer.assignment) > limit:
            large = answer
        else:
            small = answer
            best = min(best, answer, key=lambda each: each.objective)


def _mixed(problem: PairwiseProblem, limit: int, large: Solution, small: Solution) -> list[Solution]:
    """One answer on the first nodes, the other on the rest, so many of them that the limit is used best."""
    mixtures = []
    for one, other in ((large, small), (small, large)):
        first, rest = (
            torch.tensor([int(amount[choice]) for amount, choice in zip(problem.memory, each.assignment, strict=True)])
            for each in (one, other)
        )
        totals = first.cumsum(0) + rest.sum() - rest.cumsum(0)  # bytes with `one` up to this node
        at = int(torch.where(totals <= limit, totals, -1).argmax()) + 1
        assignment = one.assignment[:at] + other.assignment[at:]
        if int(totals[at - 1]) <= limit:
            mixtures.append(Solution(assignment, problem.evaluate(assignment)))
    return mixtures


def least_memory(problem: PairwiseProblem) -> Solution:
    """The allowed assignment with the fewest bytes; its objective is its memory (infinity: none is allowed)."""
    memory = problem.memory or tuple(torch.zeros(cost.shape, dtype=torch.int64) for cost in problem.costs)
    only_memory = PairwiseProblem(
        problem.names,
        tuple(
            torch.where(torch.isinf(cost), torch.inf, amount.double())
            for cost, amount in zip(problem.costs, memory, strict=True)
        ),
        problem.edges,
        tuple(torch.where(torch.isinf(matrix), torch.inf, 0.0).double() for matrix in problem.edge_costs),
    )
    return Eliminator(only_memory).solve()


def _charged(solution: Solution, charges: Sequence[torch.Tensor]) -> Fraction:
    """Cost and charges of an assignment, exactly: the search ends by comparing such sums."""
    return Fraction(solution.objective) + sum(
        Fraction(float(charge[choice])) for charge, choice in zip(charges, solution.assignment, strict=True)
    )


def _rounded_down(value: Fraction) -> float:
    """The greatest float that is not above `value`."""
    number = float(value)
    return number if Fraction(number) <= value else math.nextafter(number, -math.inf)
