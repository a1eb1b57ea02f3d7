"""Better answers under a memory cap from known ones: one answer on a run of nodes, another elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shard_spec.optimal.problem import PairwiseProblem, Solution

_MAX_BLOCKS = 512  # more nodes than that are taken in blocks of neighbours


class Mixer:
    """Mixes assignments of one problem so that they stay within `limit` bytes.

    Runs are of nodes in the order in which they were added to the problem, which puts neighbours near each other.
    """

    def __init__(self, problem: PairwiseProblem, limit: int) -> None:
        self.problem, self.limit, self.flat = problem, limit, problem.flat
        self.num_blocks = min(problem.num_nodes, _MAX_BLOCKS)
        self.block = torch.arange(problem.num_nodes) * self.num_blocks // max(problem.num_nodes, 1)
        self.groups = _edges_by_shape(problem)
        self.neighbours: list[set[int]] = [set() for _ in range(problem.num_nodes)]
        for i, j in problem.edges:
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)

    def improve(
        self, start: Solution, others: Sequence[tuple[int, ...]], enough: Callable[[Solution], bool]
    ) -> Solution:
        """The best answer that repeated mixing and single changes lead to; never worse than `start`.

        Args:
            start: an answer that fits.
            others: answers to take runs from; they need not fit.
            enough: whether to stop improving.
        """
        best = self._single_changes(start)
        changed = True
        while changed:
            changed = False
            for other in others:
                if enough(best):
                    return best
                mixed = self._best_run(best, other)
                if mixed is not None and mixed.objective < best.objective:
                    best, changed = self._single_changes(mixed), True
        return best

    # ---- runs ----

    def _best_run(self, base: Solution, other: tuple[int, ...]) -> Solution | None:
        """`base` with the run of blocks of `other` that saves most and fits, or `None`."""
        now, new = torch.tensor(base.assignment), torch.tensor(other)
        cost, memory = self._gains(now, new)
        cost = torch.where(memory <= self.limit, cost, torch.inf)
        begin, end = divmod(int(cost.argmin()), self.num_blocks + 1)
        if not float(cost[begin, end]) < 0:
            return None
        chosen = torch.where((self.block >= begin) & (self.block < end), new, now)
        assignment = tuple(chosen.tolist())
        if self.problem.memory_of(assignment) > self.limit:
            return None
        return Solution(assignment, self.problem.evaluate(assignment))

    def _gains(self, now: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """``[begin, end]`` tables: added cost, and total memory, if blocks ``begin..end-1`` are taken from `new`."""
        size = self.num_blocks + 1
        cost = torch.zeros(size, dtype=torch.float64)
        cost.index_add_(0, self.block + 1, self.flat.node_costs(new) - self.flat.node_costs(now))
        memory = torch.zeros(size, dtype=torch.int64)
        memory.index_add_(0, self.block + 1, self.flat.bytes(new) - self.flat.bytes(now))
        cost_before, memory_before = cost.cumsum(0), memory.cumsum(0)
        total_cost = cost_before[None, :] - cost_before[:, None] + self._edge_gains(now, new)
        total_memory = memory_before[None, :] - memory_before[:, None] + int(self.flat.bytes(now).sum())
        later = torch.arange(size)
        return torch.where(later[None, :] > later[:, None], total_cost, torch.inf), total_memory

    def _edge_gains(self, now: Tensor, new: Tensor) -> Tensor:
        """``[begin, end]``: added cost of the edges, by whether a run holds both ends or one of them."""
        size = self.num_blocks + 1
        before = self.flat.edge_costs(now)
        both = _bounded(self.flat.edge_costs(new) - before)
        first_only = _bounded(self.flat.edge_costs(new, now) - before)
        second_only = _bounded(self.flat.edge_costs(now, new) - before)
        first, second = self.block[self.flat.first], self.block[self.flat.second]  # first <= second: edges ascend
        zero, last = torch.zeros_like(first), torch.full_like(first, size - 1)
        # A run holds a block b if begin <= b < end. Rectangles of (begin, end), both ends inclusive:
        rectangles = [
            (zero, first, first + 1, second, first_only),  # the first node's block, not the second's
            (zero, first, second + 1, last, both),
            (first + 1, second, second + 1, last, second_only),
        ]
        table = torch.zeros((size + 1) * (size + 1), dtype=torch.float64)  # its running sums are the gains
        for top, bottom, left, right, gain in rectangles:
            gain = torch.where((top <= bottom) & (left <= right), gain, 0.0)
            for row, column, sign in (
                (top, left, 1),
                (bottom + 1, left, -1),
                (top, right + 1, -1),
                (bottom + 1, right + 1, 1),
            ):
                table.index_add_(0, row * (size + 1) + column, sign * gain)
        return table.reshape(size + 1, size + 1).cumsum(0).cumsum(1)[:size, :size]

    # ---- single nodes ----

    def _single_changes(self, start: Solution) -> Solution:
        """Transaction one node at a time while that saves cost and fits."""
        problem, best = self.problem, start
        chosen = torch.tensor(start.assignment)
        room = self.limit - problem.memory_of(start.assignment)
        while True:
            changes = self._saving_changes(chosen, room)
            touched: set[int] = set()
            for saved, node, strategy, more in sorted(changes):
                if saved < 0 and more <= room and not touched & (self.neighbours[node] | {node}):
                    chosen[node], room = strategy, room - more
                    touched.add(node)
            assignment = tuple(chosen.tolist())
            found = Solution(assignment, problem.evaluate(assignment)) if touched else best
            if not found.objective < best.objective:
                return best
            best = found

    def _saving_changes(self, chosen: Tensor, room: int) -> list[tuple[float, int, int, int]]:
        """For each node its best change that fits: (added cost, node, strategy, added bytes)."""
        local = [cost.clone() for cost in self.problem.costs]
        for edges in self.groups:
            for nodes, rows in self.flat.edge_rows(edges, chosen):
                for node, row in zip(nodes.tolist(), rows, strict=True):
                    local[node] += row
        changes = []
        for node, (costs, amounts) in enumerate(zip(local, self.problem.memory, strict=True)):
            now = int(chosen[node])
            more = amounts - amounts[now]
            costs = torch.where(more <= room, costs, torch.inf)
            strategy = int(costs.argmin())
            saved = float(costs[strategy] - costs[now])
            if saved < 0:
                changes.append((saved, node, strategy, int(more[strategy])))
        return changes


def _edges_by_shape(problem: PairwiseProblem) -> list[Tensor]:
    """Indices of the edges, those with matrices of one shape together."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for edge, matrix in enumerate(problem.edge_costs):
        shapes.setdefault(tuple(matrix.shape), []).append(edge)
    return [torch.tensor(edges) for edges in shapes.values()]


def _bounded(gain: Tensor) -> Tensor:
    """Forbidden pairs as a cost that nothing outweighs, so that sums and differences stay numbers."""
    return gain.clamp(max=2.0**30)
