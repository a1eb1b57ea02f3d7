"""BalancedPlanner: tables dealt out over ranks so that the fullest rank holds as little as possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.planners.base import Decisions, LayoutPlanner, MeshLike
from shard_spec.planners.optimality_bound import OptimalityBound

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Cost = Callable[[str, nn.Parameter], float]


@dataclass(frozen=True)
class Group:
    """Parameters that go to one rank together, and what they weigh."""

    names: tuple[str, ...]
    cost: float


class BalancedPlanner(LayoutPlanner):
    """Gives each table (embedding weight) to one rank, or cuts tables by rows where that balances better.

    Whole tables: longest first to the emptiest rank, then moves and exchanges while the fullest rank gets emptier. By
    rows: tables are laid end to end and cut into equal shares, so that at most ``ranks - 1`` tables are cut. The
    plan's certificate compares the fullest rank with what no assignment can undercut: the mean, or the heaviest
    group.

    Args:
        mesh: the axes of the plan.
        axis: the axis over whose ranks tables are dealt.
        cost: ``"bytes"``, or a function of name and parameter, of any unit (lookups a step, for example).
        cut: ``"whole"`` tables or ``"rows"``.
        tables: patterns of the parameters to deal; by default the weights of all ``nn.Embedding`` and
            ``nn.EmbeddingBag``.
        colocate: groups of patterns; what one group's patterns match goes to one rank (only whole tables).
        memory_limit: bytes that a rank has for the tables.

    Raises:
        PlanError: no table is matched, a pattern matches nothing, a table is in two groups, or the limit cannot be
        kept:
            the error says by how many bytes, on which rank, and what would fit.
    """

    def __init__(
        self,
        mesh: MeshLike | DeviceMesh,
        axis: str = "dp",
        *,
        cost: Literal["bytes"] | Cost = "bytes",
        cut: Literal["whole", "rows"] = "whole",
        tables: Sequence[str] | None = None,
        colocate: Sequence[Sequence[str]] = (),
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(mesh)
        self.axis, self.num_ranks = axis, self.mesh.axis_size(axis)
        if cut not in ("whole", "rows"):
            raise ValueError(f"cut={cut!r}: choose 'whole' or 'rows'.")
        if cut == "rows" and colocate:
            found = "cut='rows' cuts tables wherever shares end"
            raise PlanError(Problem("invalid-argument", "colocate", found=found, hint="use cut='whole'"))
        self.cost, self.cut, self.memory_limit = cost, cut, memory_limit
        self.tables = None if tables is None else tuple(tables)
        self.colocate = tuple(tuple(group) for group in colocate)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        """Deals the tables out."""
        tables = self._tables(module)
        costs = {name: self._cost_of(name, table) for name, table in tables.items()}
        if self.cut == "rows":
            sizes = rows_by_share({name: table.shape[0] for name, table in tables.items()}, costs, self.num_ranks)
            bound = sum(costs.values()) / self.num_ranks
        else:
            groups = self._groups(tables, costs)
            owner = deal(groups, self.num_ranks)
            sizes = {
                name: tuple(tables[name].shape[0] if rank == owner[at] else 0 for rank in range(self.num_ranks))
                for at, group in enumerate(groups)
                for name in group.names
            }
            bound = max(sum(costs.values()) / self.num_ranks, *(group.cost for group in groups))
        loads = [sum(costs[n] * s[rank] / max(sum(s), 1) for n, s in sizes.items()) for rank in range(self.num_ranks)]
        bytes_ = [sum(_row_bytes(tables[n]) * s[rank] for n, s in sizes.items()) for rank in range(self.num_ranks)]
        self._require_room(bytes_, tables)
        layouts = {
            name: Layout(self.mesh, {self.axis: f"U(0, [{', '.join(map(str, rows))}])"}) for name, rows in sizes.items()
        }
        certificate = OptimalityBound(
            objective=max(loads),
            lower_bound=min(bound, max(loads)),
            unit="bytes" if self.cost == "bytes" else "cost",
            method="mean and heaviest group",
            memory_bytes=max(bytes_),
            memory_limit=self.memory_limit,
            choices=tuple((name, _where(rows)) for name, rows in sizes.items()),
        )
        return Decisions(layouts, certificate=certificate)

    def _tables(self, module: nn.Module) -> dict[str, nn.Parameter]:
        parameters = dict(module.named_parameters())
        if self.tables is not None:
            return _matched(self.tables, parameters, "tables")
        weights = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        found = {name: parameter for name, parameter in parameters.items() if id(parameter) in weights}
        if not found:
            raise PlanError(
                Problem("nothing-to-optimize", found="the module has no nn.Embedding", hint="say which with tables=")
            )
        return found

    def _cost_of(self, name: str, table: nn.Parameter) -> float:
        cost = table.numel() * table.element_size() if self.cost == "bytes" else float(self.cost(name, table))
        if not cost >= 0:
            raise PlanError(Problem("invalid-argument", name, found=f"cost {cost}", hint="costs are zero or more"))
        return cost

    def _groups(self, tables: Mapping[str, nn.Parameter], costs: Mapping[str, float]) -> list[Group]:
        groups, taken, problems = [], set[str](), []
        for patterns in self.colocate:
            names = tuple(_matched(patterns, tables, "colocate"))
            problems += [
                Problem("duplicate-name", name, found=f"{patterns} matches it too", hint="name it in one group")
                for name in names
                if name in taken
            ]
            taken.update(names)
            groups.append(Group(names, sum(costs[name] for name in names)))
        if problems:
            raise PlanError(problems)
        return groups + [Group((name,), costs[name]) for name in tables if name not in taken]

    def _require_room(self, bytes_: Sequence[int], tables: Mapping[str, nn.Parameter]) -> None:
        if self.memory_limit is None or max(bytes_) <= self.memory_limit:
            return
        worst = max(range(len(bytes_)), key=bytes_.__getitem__)
        total, over = sum(bytes_), bytes_[worst] - self.memory_limit
        changes = [f"memory_limit={bytes_[worst]}"]
        enough = _ranks_that_fit(tables, self.num_ranks, self.memory_limit)
        if enough == self.num_ranks:
            changes.append("cut='rows', cost='bytes' on the same ranks")
        elif enough is not None:
            changes.append(f"{self.axis}={enough} with cut='rows', cost='bytes'")
        raise PlanError(
            Problem(
                "does-not-fit",
                "memory_limit",
                axis=self.axis,
                found=f"place {worst} on the axis needs {bytes_[worst]:,} bytes, {over:,} more than the limit of "
                f"{self.memory_limit:,}; all tables together have {total:,}",
                hint="would fit: " + "; ".join(changes),
            )
        )


def _ranks_that_fit(tables: Mapping[str, nn.Parameter], at_least: int, limit: int) -> int | None:
    """The fewest ranks, `at_least` or more, that hold the tables when these are cut by rows; tried, not estimated."""
    rows = {name: table.shape[0] for name, table in tables.items()}
    row_bytes = {name: _row_bytes(table) for name, table in tables.items()}
    costs = {name: float(row_bytes[name] * rows[name]) for name in tables}
    fewest = max(at_least, -(-int(sum(costs.values())) // max(limit, 1)))
    for num_ranks in range(fewest, fewest + 64):
        sizes = rows_by_share(rows, costs, num_ranks)
        if max(sum(row_bytes[n] * parts[rank] for n, parts in sizes.items()) for rank in range(num_ranks)) <= limit:
            return num_ranks
        if num_ranks > sum(rows.values()):
            break
    return None


def deal(groups: Sequence[Group], num_ranks: int) -> list[int]:
    """The rank of each group: longest first to the emptiest rank, then what helps the fullest one."""
    owner = [0] * len(groups)
    loads = [0.0] * num_ranks
    for at in sorted(range(len(groups)), key=lambda at: (-groups[at].cost, at)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        owner[at] = rank
        loads[rank] += groups[at].cost
    while (change := _better(groups, owner, loads)) is not None:
        for at, rank in change:
            loads[owner[at]] -= groups[at].cost
            loads[rank] += groups[at].cost
            owner[at] = rank
    return owner


def _better(groups: Sequence[Group], owner: Sequence[int], loads: Sequence[float]) -> list[tuple[int, int]] | None:
    """The move or exchange that relieves the fullest rank most; ``None`` if none does."""
    fullest = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
    best, best_load = None, loads[fullest] * (1 - 1e-12)
    for at in (at for at, rank in enumerate(owner) if rank == fullest):
        for rank in range(len(loads)):
            after = max(loads[fullest] - groups[at].cost, loads[rank] + groups[at].cost)
            if rank != fullest and after < best_load:
                best, best_load = [(at, rank)], after
        for other, rank in enumerate(owner):
            difference = groups[at].cost - groups[other].cost
            after = max(loads[fullest] - difference, loads[rank] + difference)
            if rank != fullest and after < best_load:
                best, best_load = [(at, rank), (other, fullest)], after
    return best


def rows_by_share(rows: Mapping[str, int], costs: Mapping[str, float], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Rows of each table on each rank, tables laid end to end and cut into equal shares at the nearest row."""
    total = sum(costs.values())
    shares = [total * rank / num_ranks for rank in range(num_ranks + 1)]
    found, before = {}, 0.0
    for name, num_rows in rows.items():
        row_cost = costs[name] / num_rows if num_rows else 0.0
        ends = [0]
        for share in shares[1:-1]:
            wanted = round((share - before) / row_cost) if row_cost else 0
            ends.append(min(max(wanted, 0), num_rows))
        ends.append(num_rows)
        found[name] = tuple(after - start for start, after in itertools.pairwise(ends))
        before += costs[name]
    return found


def _matched(patterns: Sequence[str], parameters: Mapping[str, nn.Parameter], argument: str) -> dict[str, nn.Parameter]:
    """Return the names that `patterns` match, in model order; every pattern has to match something."""
    read = [Pattern(text) for text in patterns]
    problems = [
        Problem("unmatched-pattern", pattern.text, found=f"{argument}= means nothing", hint="correct the pattern")
        for pattern in read
        if not any(pattern.matches(name) for name in parameters)
    ]
    if problems:
        raise PlanError(problems)
    return {name: value for name, value in parameters.items() if any(pattern.matches(name) for pattern in read)}


def _row_bytes(table: nn.Parameter) -> int:
    return table[0].numel() * table.element_size() if table.shape[0] else 0


def _where(rows: Sequence[int]) -> str:
    """Return the rows of each rank as text."""
    return ", ".join(f"{count} rows on {rank}" for rank, count in enumerate(rows) if count) or "no rows"
