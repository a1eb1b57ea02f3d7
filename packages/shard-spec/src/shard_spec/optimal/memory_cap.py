"""The pairwise model with one inequality: total memory at most a limit. Answers carry a proof of how good they are.

Bound: charge a price per byte and drop the inequality (Lagrangian relaxation). For any price, the exact optimum of the
priced problem minus price times limit is a lower bound; the best price is found by intersecting the lines of two known
answers (a one-dimensional cutting-plane method, finite). Answer: the two answers that the best price leaves open, one
too big and one too dear, are mixed: the cheaper one on a run of neighbouring nodes (layers), the smaller one elsewhere,
best run over all O(n^2) at once; again with every known answer until nothing improves. If the gap is still too large,
the most contended node's strategies are split in two halves and both are solved (branch and bound), best bound first.

Source of the bounding idea: Fisher, "The Lagrangian relaxation method for solving integer programming problems"
(Management Science 27(1), 1981); Handler and Zang's line intersection for a single constraint (Networks 10, 1980).

Better answers under a memory cap from known ones: one answer on a run of nodes, another elsewhere.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from shard_spec.optimal.problem import QUANTUM, Eliminator, PairwiseProblem, Solution

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
        """Change one node at a time while that saves cost and fits."""
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


class InfeasibleError(ValueError):
    """No assignment keeps the limit. `least_bytes` is what the smallest one needs (-1: none is allowed at all)."""

    def __init__(self, least_bytes: int, limit: int) -> None:
        self.least_bytes, self.limit = least_bytes, limit
        super().__init__(f"the smallest assignment needs {least_bytes:,} bytes, the limit is {limit:,}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.least_bytes, self.limit)


@dataclass(frozen=True)
class CappedSolution:
    """The best assignment found under the limit, and the lower bound that no assignment can undercut.

    `exhausted`: the search ended by proof or by reaching the wanted gap, not by the clock.
    """

    assignment: tuple[int, ...]
    objective: float
    lower_bound: float
    memory: int
    price: float
    num_solves: int
    exhausted: bool

    @property
    def gap(self) -> float:
        """``(objective - lower_bound) / objective``; 0 when proven optimal."""
        if self.objective <= self.lower_bound:
            return 0.0
        return (self.objective - self.lower_bound) / abs(self.objective)


def solve_capped(
    problem: PairwiseProblem,
    limit: int,
    *,
    gap: float = 0.0,
    time_limit: float | None = 5.0,
    max_solves: int | None = None,
) -> CappedSolution:
    """Minimises cost with total memory of at most `limit` bytes.

    Args:
        problem: with `memory`.
        limit: bytes.
        gap: stop when proven to be within this share of the optimum.
        time_limit: stop after so many seconds; the answer may then depend on the machine's speed.
        max_solves: stop after so many exact solves; the same on every machine.

    Raises:
        InfeasibleError: no assignment keeps the limit.
    """
    return _Search(problem, limit, gap, time_limit, max_solves).run()


def least_memory(problem: PairwiseProblem) -> Solution:
    """The allowed assignment with the fewest bytes; its objective is its memory (infinity: none is allowed)."""
    only_memory = PairwiseProblem(
        problem.names,
        tuple(
            torch.where(torch.isinf(cost), torch.inf, amount.double())
            for cost, amount in zip(problem.costs, problem.memory, strict=True)
        ),
        problem.edges,
        tuple(torch.where(torch.isinf(matrix), torch.inf, 0.0).double() for matrix in problem.edge_costs),
    )
    return Eliminator(only_memory).solve()


@dataclass(order=True)
class _Branch:
    """A part of the search space: for each node, which strategies are left (`None`: all)."""

    lower_bound: float
    order: int
    allowed: dict[int, Tensor]
    price: float
    split_at: int | None = None
    threshold: int = 0


class _Search:
    """Branch and bound over Lagrangian bounds."""

    def __init__(
        self, problem: PairwiseProblem, limit: int, gap: float, time_limit: float | None, max_solves: int | None
    ) -> None:
        self.max_solves = math.inf if max_solves is None else max_solves
        self.problem, self.limit, self.gap = problem, limit, gap
        self.deadline = math.inf if time_limit is None else time.monotonic() + time_limit
        self.eliminator = Eliminator(problem)
        self.mixer = Mixer(problem, limit)
        self.best: Solution | None = None
        self.pool: list[tuple[int, ...]] = []
        self.num_solves = 0

    def run(self) -> CappedSolution:
        smallest = least_memory(self.problem)
        if smallest.objective > self.limit:
            least = -1 if math.isinf(smallest.objective) else int(smallest.objective)
            raise InfeasibleError(least, self.limit)
        self._offer(smallest.assignment)
        root = self._bounded(_Branch(-math.inf, 0, {}, 0.0))
        queue = [root]
        created, closed_bound = 1, math.inf
        while queue and not self._good_enough(queue[0].lower_bound) and not self._out_of_time():
            branch = heapq.heappop(queue)
            for allowed in self._halves(branch):
                child = self._bounded(_Branch(branch.lower_bound, created, allowed, branch.price))
                created += 1
                if child.split_at is None:
                    closed_bound = min(closed_bound, child.lower_bound)
                else:
                    heapq.heappush(queue, child)
        assert self.best is not None
        open_bound = min([branch.lower_bound for branch in queue], default=math.inf)
        bound = min(open_bound, closed_bound, self.best.objective)
        return CappedSolution(
            assignment=self.best.assignment,
            objective=self.best.objective,
            lower_bound=bound,
            memory=self.problem.memory_of(self.best.assignment),
            price=root.price,
            num_solves=self.num_solves,
            exhausted=not queue or self._good_enough(bound),
        )

    def _good_enough(self, bound: float) -> bool:
        assert self.best is not None
        return self.best.objective - bound <= self.gap * abs(self.best.objective)

    def _out_of_time(self) -> bool:
        return time.monotonic() > self.deadline or self.num_solves >= self.max_solves

    # ---- bounds ----

    def _bounded(self, branch: _Branch) -> _Branch:
        """Finds the branch's best price, offers every assignment met, and says where to split (nowhere: closed)."""
        cheap, bound = self._priced(branch.allowed, 0.0)
        branch.lower_bound = max(branch.lower_bound, bound)
        if cheap is None or self.problem.memory_of(cheap) <= self.limit:
            return branch  # nothing allowed, or the unpriced optimum fits: closed
        small = self._small(branch.allowed)
        if small is None:
            branch.lower_bound = math.inf
            return branch
        while True:
            price = self._meeting_price(cheap, small)
            ceiling = self.problem.evaluate(cheap) + price * (self.problem.memory_of(cheap) - self.limit)
            found, bound = self._priced(branch.allowed, price)
            if bound > branch.lower_bound:
                branch.lower_bound, branch.price = bound, price
            assert found is not None
            if found in (cheap, small) or not self._below(found, cheap, price):
                break
            if self.problem.memory_of(found) > self.limit:
                cheap = found
            else:
                small = found
            if ceiling - bound <= 0.2 * self.gap * abs(ceiling) or self._out_of_time():
                break  # no price can prove much more than this one did
        self._mix([cheap, small], branch.lower_bound)
        assert self.best is not None
        if branch.lower_bound < self.best.objective:
            branch.split_at, branch.threshold = self._contended(cheap, small)
        return branch

    def _priced(self, allowed: dict[int, Tensor], price: float) -> tuple[tuple[int, ...] | None, float]:
        """The optimum at `price` and the bound that follows; ``None`` if nothing is allowed."""
        self.num_solves += 1
        extra = []
        for node, amount in enumerate(self.problem.memory):
            # Rounded down to the quantum: sums stay exact, and the bound stays a bound.
            charge = torch.floor(amount.double() * price / QUANTUM) * QUANTUM
            if node in allowed:
                charge = torch.where(allowed[node], charge, torch.inf)
            extra.append(charge)
        found = self.eliminator.solve(extra)
        if math.isinf(found.objective) or any(not allowed[node][found.assignment[node]] for node in allowed):
            return None, math.inf
        charged = sum(Fraction(float(extra[node][choice])) for node, choice in enumerate(found.assignment))
        bound = Fraction(found.objective) + charged - Fraction(price) * self.limit
        self._offer(found.assignment)
        return found.assignment, _rounded_down(bound)

    def _small(self, allowed: dict[int, Tensor]) -> tuple[int, ...] | None:
        """A fitting assignment of the branch, priced so high that memory alone counts."""
        restricted = PairwiseProblem(
            self.problem.names,
            tuple(
                torch.where(allowed[node], cost, torch.inf) if node in allowed else cost
                for node, cost in enumerate(self.problem.costs)
            ),
            self.problem.edges,
            self.problem.edge_costs,
            self.problem.memory,
        )
        self.num_solves += 1
        smallest = least_memory(restricted)
        if smallest.objective > self.limit:
            return None
        self._offer(smallest.assignment)
        return smallest.assignment

    def _meeting_price(self, cheap: tuple[int, ...], small: tuple[int, ...]) -> float:
        """The price at which both cost the same."""
        more = self.problem.evaluate(small) - self.problem.evaluate(cheap)
        fewer = self.problem.memory_of(cheap) - self.problem.memory_of(small)
        return max(0.0, more / fewer)

    def _below(self, found: tuple[int, ...], cheap: tuple[int, ...], price: float) -> bool:
        """Return whether `found` is really better than `cheap` at `price`, not just by the rounding of charges."""
        saved = self.problem.evaluate(cheap) - self.problem.evaluate(found)
        saved += price * (self.problem.memory_of(cheap) - self.problem.memory_of(found))
        return saved > self.problem.num_nodes * QUANTUM

    # ---- answers ----

    def _offer(self, assignment: tuple[int, ...]) -> None:
        self.pool.append(assignment)
        if self.problem.memory_of(assignment) > self.limit:
            return
        objective = self.problem.evaluate(assignment)
        if self.best is None or objective < self.best.objective:
            self.best = Solution(assignment, objective)

    def _mix(self, others: list[tuple[int, ...]], bound: float) -> None:
        """Improves the best answer by runs of nodes taken from other answers, and by single changes."""
        assert self.best is not None
        recent = list(dict.fromkeys([*others, *self.pool[-6:]]))

        def enough(found: Solution) -> bool:
            return found.objective - bound <= self.gap * abs(found.objective) or time.monotonic() > self.deadline

        improved = self.mixer.improve(self.best, recent, enough)
        if improved.objective < self.best.objective:
            self.best = improved

    # ---- branching ----

    def _contended(self, cheap: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, int]:
        """The node whose two choices differ most in memory, and the bytes half-way between them."""
        differ = [
            (abs(int(amount[a]) - int(amount[b])), -node)
            for node, (amount, a, b) in enumerate(zip(self.problem.memory, cheap, small, strict=True))
        ]
        most, negative = max(differ)
        assert most > 0, "the larger answer is larger somewhere"
        node = -negative
        amounts = self.problem.memory[node]
        return node, (int(amounts[cheap[node]]) + int(amounts[small[node]])) // 2

    def _halves(self, branch: _Branch) -> list[dict[int, Tensor]]:
        """The two halves of the branch: little memory at the contended node, or much."""
        assert branch.split_at is not None
        node = branch.split_at
        amounts = self.problem.memory[node]
        before = branch.allowed.get(node, torch.ones(amounts.shape, dtype=torch.bool))
        little = amounts <= branch.threshold
        return [{**branch.allowed, node: before & side} for side in (little, ~little)]


def _rounded_down(value: Fraction) -> float:
    """The greatest float that is not above `value`."""
    number = float(value)
    return number if Fraction(number) <= value else math.nextafter(number, -math.inf)
