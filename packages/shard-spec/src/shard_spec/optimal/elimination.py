"""Exact minimisation by eliminating one node after the other (bucket elimination in the min-plus semiring).

Eliminating a node replaces it and its edges by one table over its neighbours: for each combination of their
strategies, the least cost the node can have. Work grows with the tables, so nodes with few neighbours go first
(min-degree). A chain of layers with residual connections never needs tables over more than two or three nodes,
however many layers there are, and no two layers have to choose alike. Source: Dechter, "Bucket elimination: a
unifying framework for reasoning" (AIJ 113, 1999).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shard_spec.optimal.problem import PairwiseProblem, Solution

MAX_TABLE_ENTRIES = 2**27  # 1 GiB of float64
MAX_KEPT_ENTRIES = 2**13


class TooConnectedError(ValueError):
    """The graph needs a table that would not fit in memory; exact elimination is the wrong tool for it."""


@dataclass(frozen=True)
class Step:
    """Eliminate `node`: add its factors into a table over ``(*neighbours, node)``, minimise over the node.

    A factor is the index of an edge, or number of edges + index of the step whose table it is.
    """

    node: int
    neighbours: tuple[int, ...]
    factors: tuple[int, ...]


def solve_exact(problem: PairwiseProblem) -> Solution:
    """The least-cost assignment of `problem`; the first one in strategy order where several cost the same.

    Raises:
        TooConnectedError: a table over more than `MAX_TABLE_ENTRIES` combinations would be needed.
    """
    return Eliminator(problem).solve([torch.zeros(cost.numel(), 1, dtype=torch.float64) for cost in problem.costs])[0]


class Eliminator:
    """A problem with its elimination order, to be solved several times with other node costs."""

    def __init__(self, problem: PairwiseProblem) -> None:
        self.problem = problem
        self.steps = plan_elimination([cost.numel() for cost in problem.costs], problem.edges)
        self._fixed = [self._fixed_part(step) for step in self.steps]

    def solve(self, extra: Sequence[Tensor]) -> list[Solution]:
        """Solves for several node costs at once.

        Args:
            extra: per node a float64 tensor ``[num_strategies, num_variants]`` that is added to its costs.

        Returns:
            One solution per variant, its objective without `extra`.
        """
        num_variants = extra[0].shape[1] if extra else 1
        tables: list[Tensor] = []
        choices: list[Tensor] = []
        for step, fixed in zip(self.steps, self._fixed, strict=True):
            table = self._joined(step, fixed, extra[step.node], tables)
            least, choice = table.min(dim=0)  # over the node's strategies
            tables.append(least)
            choices.append(choice)
        assignments = self._backtrack(choices, num_variants)
        return [Solution(found, self.problem.evaluate(found)) for found in assignments]

    def _fixed_part(self, step: Step) -> list[Tensor]:
        """Return what does not change between calls: the node's costs and edges, as ``[node, *neighbours, 1]``.

        Added up where the sum is small; a list of views where it would take memory for every step.
        """
        scope = (step.node, *step.neighbours)
        own = self.problem.costs[step.node]
        parts = [own.reshape(-1, *([1] * len(step.neighbours)), 1)]
        entries = own.numel()
        for factor in step.factors:
            if factor < len(self.problem.edges):
                edge = self.problem.edge_costs[factor][..., None]
                parts.append(_aligned(edge, self.problem.edges[factor], scope))
                entries *= edge.numel() // own.numel()
        if entries > MAX_KEPT_ENTRIES:
            return parts
        table = parts[0]
        for part in parts[1:]:
            table = table + part
        return [table]

    def _joined(self, step: Step, fixed: Sequence[Tensor], extra: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """Sum of the step's factors, as a table ``[node, *neighbours, variant]``."""
        scope = (step.node, *step.neighbours)
        table = fixed[0] + extra.reshape(extra.shape[0], *([1] * len(step.neighbours)), extra.shape[1])
        for part in fixed[1:]:
            table = table + part
        num_edges = len(self.problem.edges)
        for factor in step.factors:  # small factors first, so that few additions touch the full table
            if factor >= num_edges:
                table = table + _aligned(tables[factor - num_edges], self.steps[factor - num_edges].neighbours, scope)
        return table

    def _backtrack(self, choices: Sequence[Tensor], num_variants: int) -> list[tuple[int, ...]]:
        """Fixes the nodes in the reverse order: each one's neighbours are known when its turn comes."""
        assignments = []
        for variant in range(num_variants):
            chosen = [0] * self.problem.num_nodes
            for step, choice in zip(reversed(self.steps), reversed(choices), strict=True):
                column = min(variant, choice.shape[-1] - 1)
                chosen[step.node] = int(choice[(*(chosen[other] for other in step.neighbours), column)])
            assignments.append(tuple(chosen))
        return assignments


def plan_elimination(num_strategies: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[Step, ...]:
    """The min-degree order (smallest table among equals, then lowest index) and which factor meets which.

    Raises:
        TooConnectedError: a table would have more than `MAX_TABLE_ENTRIES` entries.
    """
    num_nodes = len(num_strategies)
    adjacent: list[set[int]] = [set() for _ in range(num_nodes)]
    factors_of: list[set[int]] = [set() for _ in range(num_nodes)]
    scopes: dict[int, tuple[int, ...]] = dict(enumerate(edges))
    for index, (i, j) in enumerate(edges):
        adjacent[i].add(j)
        adjacent[j].add(i)
        factors_of[i].add(index)
        factors_of[j].add(index)

    queue = _DegreeQueue(num_strategies, adjacent)
    steps = []
    for position in range(num_nodes):
        node = queue.pop()
        neighbours = tuple(sorted(adjacent[node]))
        entries = num_strategies[node] * math.prod(num_strategies[other] for other in neighbours)
        if entries > MAX_TABLE_ENTRIES:
            raise TooConnectedError(
                f"exact elimination would need a table of {entries:,} entries over {len(neighbours) + 1} nodes: "
                "give the nodes fewer strategies or the graph fewer connections."
            )
        used = tuple(sorted(factors_of[node], key=lambda index: (len(scopes[index]), index)))
        steps.append(Step(node, neighbours, used))
        result = len(edges) + position
        scopes[result] = neighbours
        for other in neighbours:
            factors_of[other] -= factors_of[node]
            if neighbours:
                factors_of[other].add(result)
            adjacent[other].discard(node)
            adjacent[other].update(third for third in neighbours if third != other)
            queue.update(other)
    return tuple(steps)


class _DegreeQueue:
    """Nodes by (degree, table size, index); stale entries are dropped when they come up."""

    def __init__(self, num_strategies: Sequence[int], adjacent: Sequence[set[int]]) -> None:
        self._num_strategies = num_strategies
        self._adjacent = adjacent
        self._alive = set(range(len(num_strategies)))
        self._heap: list[tuple[int, int, int]] = []
        for node in range(len(num_strategies)):
            self.update(node)

    def update(self, node: int) -> None:
        heapq.heappush(self._heap, self._key(node))

    def pop(self) -> int:
        while True:
            key = heapq.heappop(self._heap)
            node = key[2]
            if node in self._alive and key == self._key(node):
                self._alive.remove(node)
                return node

    def _key(self, node: int) -> tuple[int, int, int]:
        size = self._num_strategies[node]
        for other in self._adjacent[node]:
            size *= self._num_strategies[other]
        return len(self._adjacent[node]), size, node


def _aligned(values: Tensor, nodes: Sequence[int], scope: Sequence[int]) -> Tensor:
    """`values` over ``(*nodes, variant)`` as a broadcastable view over ``(*scope, variant)``."""
    order = sorted(range(len(nodes)), key=lambda dim: scope.index(nodes[dim]))
    moved = values.permute(*order, values.dim() - 1)
    shape = [1] * len(scope) + [values.shape[-1]]
    for position, dim in enumerate(order):
        shape[scope.index(nodes[dim])] = moved.shape[position]
    return moved.reshape(shape)
