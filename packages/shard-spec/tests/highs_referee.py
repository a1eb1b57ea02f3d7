"""The same problem as a mixed-integer program for HiGHS: the referee of the package's own solver.

One binary per node and strategy, one continuous variable per pair of strategies of an edge, tied to the binaries by
marginals (the local polytope, which is tight on trees).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from shard_spec.optimal.problem import PairwiseProblem


@dataclass(frozen=True)
class HighsAnswer:
    """Answer of HiGHS. `assignment` is empty if it found none in time; then `objective` is infinite."""

    assignment: tuple[int, ...]
    objective: float
    lower_bound: float
    status: str


def solve_highs(problem: PairwiseProblem, limit: int | None = None, *, time_limit: float = 60.0) -> HighsAnswer:
    """Minimises `problem` with HiGHS, with total memory of at most `limit` bytes if given."""
    import highspy as untyped

    highspy: Any = untyped
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("time_limit", time_limit)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 0.0)
    # Seconds are small numbers; in units of the mean cost the solver's absolute tolerances mean something.
    scale = _scale(problem)
    choose = []
    for cost in problem.costs:
        variables = []
        for value in cost.tolist():
            upper = 0.0 if math.isinf(value) else 1.0
            variables.append(model.addBinary(obj=0.0 if math.isinf(value) else value / scale))
            model.changeColBounds(variables[-1].index, 0.0, upper)
        model.addConstr(sum(variables) == 1)
        choose.append(variables)
    for (i, j), matrix in problem.matrices.items():
        pairs = [
            [
                model.addVariable(
                    lb=0.0, ub=0.0 if math.isinf(value) else 1.0, obj=0.0 if math.isinf(value) else value / scale
                )
                for value in row
            ]
            for row in matrix.tolist()
        ]
        for k, row in enumerate(pairs):
            model.addConstr(sum(row) == choose[i][k])
        for k in range(matrix.shape[1]):
            model.addConstr(sum(row[k] for row in pairs) == choose[j][k])
    if limit is not None:
        unit = max(limit, 1)
        terms = [
            variable * (int(amount[k]) / unit)
            for variables, amount in zip(choose, problem.memory, strict=True)
            for k, variable in enumerate(variables)
        ]
        model.addConstr(sum(terms) <= limit / unit)
    model.run()
    return _answer(problem, model, choose, scale)


def _answer(problem: PairwiseProblem, model: Any, choose: list[list[Any]], scale: float) -> HighsAnswer:
    status = str(model.modelStatusToString(model.getModelStatus()))
    info = model.getInfo()
    values = model.getSolution().col_value
    bound = float(info.mip_dual_bound) * scale
    if not values or info.primal_solution_status != 2:  # 2: feasible
        return HighsAnswer((), math.inf, bound, status)
    picked = tuple(
        int(torch.tensor([values[variable.index] for variable in variables]).argmax()) for variables in choose
    )
    return HighsAnswer(picked, problem.evaluate(picked), bound, status)


def _scale(problem: PairwiseProblem) -> float:
    finite = torch.cat([cost[torch.isfinite(cost)] for cost in problem.costs])
    mean = float(finite.abs().mean()) if finite.numel() else 0.0
    return mean or 1.0
