"""The pairwise model: every node takes one of its strategies; nodes and edges have costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Costs are rounded to multiples of 2**-40 s (about a picosecond). Sums of such numbers below 2**12 s are exact in
# float64, so the order in which the solver adds cannot change the result, and equal plans have equal cost to the last
# bit.
QUANTUM = 2.0**-40


@dataclass(frozen=True, eq=False)
class PairwiseProblem:
    """Minimise ``sum_i costs[i][x_i] + sum_(i,j) edge_costs[(i,j)][x_i, x_j]`` over one ``x_i`` per node.

    Args:
        names: what each node is called in messages.
        costs: one float64 tensor ``[num_strategies_i]`` per node; infinity forbids a strategy.
        edges: pairs ``(i, j)`` with ``i < j``, each once.
        edge_costs: one float64 tensor ``[num_strategies_i, num_strategies_j]`` per edge.
        memory: one int64 tensor ``[num_strategies_i]`` per node, in bytes; needed only under a memory cap.

    Raises:
        ValueError: shapes, dtypes or indices do not fit, or a cost is NaN or minus infinity.
    """

    names: tuple[str, ...]
    costs: tuple[Tensor, ...]
    edges: tuple[tuple[int, int], ...]
    edge_costs: tuple[Tensor, ...]
    memory: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.costs):
            raise ValueError(f"PairwiseProblem: {len(self.names)} names for {len(self.costs)} nodes.")
        if len(self.edges) != len(self.edge_costs) or len(set(self.edges)) != len(self.edges):
            raise ValueError("PairwiseProblem: each edge is given once, with one matrix.")
        if self.memory and len(self.memory) != len(self.costs):
            raise ValueError(f"PairwiseProblem: memory of {len(self.memory)} nodes, there are {len(self.costs)}.")
        for name, cost in zip(self.names, self.costs, strict=True):
            _require_costs(f"node {name!r}", cost, (cost.numel(),))
            if cost.numel() == 0:
                raise ValueError(f"PairwiseProblem: node {name!r} has no strategy.")
        for (i, j), matrix in zip(self.edges, self.edge_costs, strict=True):
            if not 0 <= i < j < len(self.names):
                raise ValueError(f"PairwiseProblem: edge {(i, j)} is not an ascending pair of nodes.")
            shape = (self.costs[i].numel(), self.costs[j].numel())
            _require_costs(f"edge {self.names[i]!r} - {self.names[j]!r}", matrix, shape)
        for name, cost, amount in zip(self.names, self.costs, self.memory, strict=False):
            if amount.dtype != torch.int64 or amount.shape != cost.shape or bool((amount < 0).any()):
                raise ValueError(f"PairwiseProblem: memory of {name!r} must be non-negative int64 {tuple(cost.shape)}.")

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    def evaluate(self, assignment: Sequence[int]) -> float:
        """The cost of `assignment` (one strategy index per node), added in node order, then edge order."""
        total = 0.0
        for cost, choice in zip(self.costs, assignment, strict=True):
            total += float(cost[choice])
        for (i, j), matrix in zip(self.edges, self.edge_costs, strict=True):
            total += float(matrix[assignment[i], assignment[j]])
        return total

    def memory_of(self, assignment: Sequence[int]) -> int:
        """Bytes of `assignment`; 0 if the problem has no memory."""
        if not self.memory:
            return 0
        return sum(int(amount[choice]) for amount, choice in zip(self.memory, assignment, strict=True))


@dataclass(frozen=True)
class Solution:
    """One strategy index per node and what it costs (infinity: no assignment is allowed)."""

    assignment: tuple[int, ...]
    objective: float


@dataclass
class PairwiseBuilder:
    """Collects nodes and edges; adds up parallel edges whichever way round they were given."""

    names: list[str] = field(default_factory=list)
    costs: list[Tensor] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    _edges: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def add_node(self, name: str, costs: Sequence[float] | Tensor, memory: Sequence[int] | Tensor | None = None) -> int:
        """Adds a node; returns its index."""
        cost = quantised(costs)
        self.names.append(name)
        self.costs.append(cost)
        bytes_ = torch.zeros(cost.shape, dtype=torch.int64) if memory is None else torch.as_tensor(memory)
        self.memory.append(bytes_.to(torch.int64))
        return len(self.names) - 1

    def add_edge(self, first: int, second: int, costs: Sequence[Sequence[float]] | Tensor) -> None:
        """Adds ``costs[x_first, x_second]``; a node with itself becomes node cost."""
        matrix = quantised(costs)
        if first == second:
            self.costs[first] = self.costs[first] + matrix.diagonal()
            return
        if first > second:
            first, second, matrix = second, first, matrix.T
        known = self._edges.get((first, second))
        self._edges[first, second] = matrix.contiguous() if known is None else known + matrix

    def build(self) -> PairwiseProblem:
        """The problem, checked."""
        edges = tuple(sorted(self._edges))
        return PairwiseProblem(
            names=tuple(self.names),
            costs=tuple(self.costs),
            edges=edges,
            edge_costs=tuple(self._edges[edge] for edge in edges),
            memory=tuple(self.memory),
        )


def quantised(costs: Sequence[float] | Sequence[Sequence[float]] | Tensor) -> Tensor:
    """`costs` as float64, rounded to multiples of `QUANTUM`."""
    tensor = torch.as_tensor(costs, dtype=torch.float64)
    return torch.round(tensor / QUANTUM) * QUANTUM


def _require_costs(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float64 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"PairwiseProblem: {what} needs float64 of shape {shape}, found {tensor.dtype} {tensor.shape}."
        )
    if bool(torch.isnan(tensor).any()) or bool((tensor == -torch.inf).any()):
        raise ValueError(f"PairwiseProblem: {what} has NaN or minus infinity.")
