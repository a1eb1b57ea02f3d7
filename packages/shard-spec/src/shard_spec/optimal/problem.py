"""Pairwise problem: every node takes one of its strategies; nodes and edges have costs.

Exact minimisation by eliminating one node after the other (bucket elimination in the min-plus semiring).

Eliminating a node replaces it and its edges by one table over its neighbours: for each combination of their
strategies, the node's least cost. Work grows with the tables, so nodes with few neighbours go first (min-degree). A
chain of layers with residual connections never needs tables over more than two or three nodes, for any number of
layers, and each layer chooses independently. Source: Dechter, "Bucket elimination: a unifying framework for reasoning"
(AIJ 113, 1999).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from shard_spec._shared.page import human_bytes

# Costs are rounded to multiples of 2**-40 s (about a picosecond). Sums of such numbers below 2**12 s are exact in
# float64: the result does not depend on the order of additions, and equal plans have bitwise equal cost.
QUANTUM = 2.0**-40


@dataclass(eq=False)
class PairwiseProblem:
    """Minimise ``sum_i costs[i][x_i] + sum_(i,j) matrices[i, j][x_i, x_j]`` over one ``x_i`` per node.

    Attributes:
        costs: one float64 tensor ``[num_strategies_i]`` per node; infinity forbids a strategy.
        memory: one int64 tensor ``[num_strategies_i]`` per node, in bytes.
        matrices: for each edge ``(i, j)``, ``i < j``, a float64 tensor ``[num_strategies_i, num_strategies_j]``.
    """

    costs: list[Tensor] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    matrices: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def add_node(self, costs: Sequence[float] | Tensor, memory: Sequence[int] | Tensor | None = None) -> int:
        """Add a node and return its index; without `memory` it needs none."""
        self.costs.append(quantised(costs))
        bytes_ = (
            torch.zeros(self.costs[-1].shape, device="cpu") if memory is None else torch.as_tensor(memory, device="cpu")
        )
        self.memory.append(bytes_.to(torch.int64))
        return len(self.costs) - 1

    def add_node_like(self, node: int) -> int:
        """Add a node with the costs and the bytes of another one, and return its index."""
        self.costs.append(self.costs[node])
        self.memory.append(self.memory[node])
        return len(self.costs) - 1

    def add_edge(self, first: int, second: int, costs: Sequence[Sequence[float]] | Tensor) -> None:
        """Add ``costs[x_first, x_second]``. Parallel edges add up; one from a node to itself becomes node cost."""
        self.add_rounded_edge(first, second, quantised(costs))

    def add_rounded_edge(self, first: int, second: int, matrix: Tensor) -> None:
        """Add an edge whose costs are `quantised` already, as those of many equal layers are."""
        if first == second:
            self.costs[first] = self.costs[first] + matrix.diagonal()
            return
        if first > second:  # edges ascend
            first, second, matrix = second, first, matrix.T
        edge = self.matrices.get((first, second))
        self.matrices[first, second] = matrix.contiguous() if edge is None else edge + matrix

    def evaluate(self, assignment: Sequence[int]) -> float:
        """Return the cost of `assignment`, one strategy index per node."""
        costs = [
            *(cost[choice] for cost, choice in zip(self.costs, assignment, strict=True)),
            *(matrix[assignment[i], assignment[j]] for (i, j), matrix in self.matrices.items()),
        ]
        return float(torch.stack(costs).sum()) if costs else 0.0

    def memory_of(self, assignment: Sequence[int]) -> int:
        """Return the bytes of `assignment`."""
        return sum(int(amount[choice]) for amount, choice in zip(self.memory, assignment, strict=True))


@dataclass(frozen=True)
class Solution:
    """One strategy index per node and the cost (infinity: no assignment is allowed)."""

    assignment: tuple[int, ...]
    objective: float


def quantised(costs: Sequence[float] | Sequence[Sequence[float]] | Tensor) -> Tensor:
    """Convert `costs` to float64, rounded to multiples of `QUANTUM`."""
    tensor = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
    if bool((tensor.isnan() | tensor.isneginf()).any()):  # would poison every sum
        raise ValueError("a cost is NaN or minus infinity: correct the cost model")
    return torch.round(tensor / QUANTUM) * QUANTUM


MAX_TABLE_ENTRIES = 2**27  # 1 GiB of float64
MAX_KEPT_ENTRIES = 2**13


class TooConnectedError(ValueError):
    """The graph needs a table beyond memory; exact elimination does not suit it."""


class Eliminator:
    """A problem with its elimination order, for repeated solves with other node costs.

    Args:
        problem: Complete: nodes and edges that are added later are not seen.
        steps: The order of an equal graph, if it is known.
    """

    def __init__(self, problem: PairwiseProblem, steps: Steps | None = None) -> None:
        self.problem = problem
        self.steps = steps or plan_elimination([cost.numel() for cost in problem.costs], list(problem.matrices))
        self._position = {node: at for at, (node, _) in enumerate(self.steps)}
        # Terms shared by all solves: a node's costs, and the edges to nodes that are eliminated later.
        self._fixed: list[list[Tensor]] = []
        for node, neighbours in self.steps:
            self._fixed.append([problem.costs[node].reshape(-1, *([1] * len(neighbours)))])
        for edge in sorted(problem.matrices):
            at = min(self._position[node] for node in edge)
            self._fixed[at].append(self._aligned_to(at, problem.matrices[edge], edge))
        for (node, neighbours), parts in zip(self.steps, self._fixed, strict=True):
            # Added up if the sum is small: views bound the memory over all steps.
            if math.prod(problem.costs[each].numel() for each in (node, *neighbours)) <= MAX_KEPT_ENTRIES:
                parts[:] = [functools.reduce(torch.add, parts)]

    def solve(self, extra: Sequence[Tensor] | None = None) -> Solution:
        """Return the best assignment, with its objective without `extra`.

        Args:
            extra: per node a float64 tensor ``[num_strategies]`` added to its costs.
        """
        # Eliminating a node adds its terms to a table ``[node, *neighbours]`` and minimises over the node. The result
        # is a term of the neighbour that goes next.
        terms = [list(parts) for parts in self._fixed]
        choices: list[Tensor] = []
        for (node, neighbours), parts in zip(self.steps, terms, strict=True):
            if extra is not None:
                parts[0] = parts[0] + extra[node].reshape(-1, *([1] * len(neighbours)))
            table = functools.reduce(torch.add, sorted(parts, key=Tensor.numel))  # few additions touch the full table
            least, choice = table.min(dim=0)
            choices.append(choice)
            if neighbours:
                at = min(self._position[other] for other in neighbours)
                terms[at].append(self._aligned_to(at, least, neighbours))
        # Nodes in reverse order: the neighbours of each one are fixed before it.
        chosen = [0] * len(self.steps)
        for (node, neighbours), choice in zip(reversed(self.steps), reversed(choices), strict=True):
            chosen[node] = int(choice[tuple(chosen[other] for other in neighbours)])
        return Solution(tuple(chosen), self.problem.evaluate(chosen))

    @functools.cached_property
    def best(self) -> Solution:
        """The least-cost assignment without a limit; of equal ones the first in strategy order."""
        return self.solve()

    @functools.cached_property
    def fewest(self) -> Solution:
        """The allowed assignment with the fewest bytes as its objective (infinity: none is allowed)."""
        problem = self.problem
        costs = [  # forbidden stays forbidden
            torch.where(torch.isinf(cost), torch.inf, amount.double())
            for cost, amount in zip(problem.costs, problem.memory, strict=True)
        ]
        matrices = {
            edge: torch.where(torch.isinf(matrix), torch.inf, 0.0).double() for edge, matrix in problem.matrices.items()
        }
        return Eliminator(PairwiseProblem(costs, problem.memory, matrices), self.steps).solve()

    def within(self, limit: int) -> CappedSolution:
        """Minimise cost within `limit` bytes, as far as one price per byte can."""
        problem, least, large = self.problem, self.fewest, self.best
        if least.objective > limit:
            raise InfeasibleError(-1 if math.isinf(least.objective) else int(least.objective), limit)
        if problem.memory_of(large.assignment) <= limit:
            return CappedSolution(large.assignment, large.objective, large.objective)
        small = Solution(least.assignment, problem.evaluate(least.assignment))
        best, bound = small, large.objective  # no cap: a lower bound
        while True:
            fewer = problem.memory_of(large.assignment) - problem.memory_of(small.assignment)
            price = (small.objective - large.objective) / fewer  # equal charged cost of both
            # Rounded down to the quantum: sums stay exact, and the bound stays a bound.
            charges = [torch.floor(amount.double() * price / QUANTUM) * QUANTUM for amount in problem.memory]
            answer = self.solve(charges)
            charged = _charged(answer, charges)
            least_cost = charged - Fraction(price) * limit
            rounded = float(least_cost)  # the nearest: may be above
            bound = max(bound, rounded if rounded <= least_cost else math.nextafter(rounded, -math.inf))
            # No cheaper one at this price, or more prices gain little.
            ended = min(_charged(large, charges), _charged(small, charges)) <= charged
            if ended or best.objective - bound <= _CLOSE * bound:
                best = min([best, *_mixed(problem, limit, large, small)], key=lambda each: each.objective)
                return CappedSolution(best.assignment, best.objective, min(bound, best.objective))
            if problem.memory_of(answer.assignment) > limit:  # keep one solution on each side of the limit
                large = answer
            else:
                small = answer
                best = min(best, answer, key=lambda each: each.objective)

    def _aligned_to(self, at: int, values: Tensor, nodes: Sequence[int]) -> Tensor:
        """View `values` over `nodes` as a tensor that broadcasts over the table of step `at`."""
        node, neighbours = self.steps[at]
        scope = (node, *neighbours)
        order = sorted(range(len(nodes)), key=lambda dim: scope.index(nodes[dim]))
        shape = [1] * len(scope)  # 1 for other nodes
        for dim in order:
            shape[scope.index(nodes[dim])] = values.shape[dim]
        return values.permute(*order).reshape(shape)


Steps = tuple[tuple[int, tuple[int, ...]], ...]  # each node with its neighbours that are left, in order


def plan_elimination(num_strategies: Sequence[int], edges: Sequence[tuple[int, int]]) -> Steps:
    """Return the min-degree order (smallest table among equals, then lowest index), each node with its neighbours."""
    num_nodes = len(num_strategies)
    adjacent: list[set[int]] = [set() for _ in range(num_nodes)]
    for i, j in edges:
        adjacent[i].add(j)
        adjacent[j].add(i)

    def degree_of(node: int) -> tuple[int, int, int]:
        size = num_strategies[node] * math.prod(num_strategies[other] for other in adjacent[node])
        return len(adjacent[node]), size, node

    degrees = {node: degree_of(node) for node in range(num_nodes)}  # of the nodes that are left
    queue = sorted(degrees.values())
    steps = []
    for _ in range(num_nodes):
        while (least := heapq.heappop(queue)) != degrees.get(least[2]):
            pass  # stale: its node has gone, or has other neighbours now
        _, entries, node = least
        del degrees[node]
        neighbours = tuple(sorted(adjacent[node]))
        if entries > MAX_TABLE_ENTRIES:  # before the allocation
            raise TooConnectedError(
                f"exact elimination would need a table of {entries:,} entries over {len(neighbours) + 1} nodes: "
                "give the nodes fewer strategies or the graph fewer connections."
            )
        steps.append((node, neighbours))
        for other in neighbours:
            adjacent[other].discard(node)
            adjacent[other].update(third for third in neighbours if third != other)  # its table couples all neighbours
            degrees[other] = degree_of(other)
            heapq.heappush(queue, degrees[other])
    return tuple(steps)


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


def _mixed(problem: PairwiseProblem, limit: int, large: Solution, small: Solution) -> list[Solution]:
    """Mix both solutions, one for the first nodes, as close to the limit as possible."""
    mixtures = []
    for head, other in ((large, small), (small, large)):
        first, rest = (
            torch.tensor(
                [int(amount[choice]) for amount, choice in zip(problem.memory, each.assignment, strict=True)],
                device="cpu",
            )
            for each in (head, other)
        )
        totals = first.cumsum(0) + rest.sum() - rest.cumsum(0)  # bytes with `one` up to this node
        at = int(torch.where(totals <= limit, totals, -1).argmax()) + 1  # most bytes within the limit
        assignment = head.assignment[:at] + other.assignment[at:]
        if int(totals[at - 1]) <= limit:
            mixtures.append(Solution(assignment, problem.evaluate(assignment)))
    return mixtures


def _charged(solution: Solution, charges: Sequence[torch.Tensor]) -> Fraction:
    """Sum cost and charges of an assignment exactly: the search ends by comparing such sums.

    Charges are multiples of the quantum, a power of two: their counts are whole numbers, and sums of these are exact.
    """
    quanta = sum(int(charge[at] / QUANTUM) for charge, at in zip(charges, solution.assignment, strict=True))
    return Fraction(solution.objective) + quanta * Fraction(QUANTUM)
