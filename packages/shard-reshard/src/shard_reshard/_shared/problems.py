"""The problem record and the error of shard-spec, on which this package builds."""

from collections.abc import Iterable

from shard_spec import PlanError as PlanError
from shard_spec import Problem as Problem


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one ``PlanError`` with all of ``problems``; return when there are none."""
    problems = tuple(problems)
    if problems:
        raise PlanError(problems)


def refusal(code: str, name: str = "", dim: int | None = None, *, found: str = "", hint: str = "") -> PlanError:
    """Return the error for one problem, for example ``refusal("missing-argument", "shape", hint="pass shape=")``."""
    return PlanError(Problem(code, name, dim, found=found, hint=hint))
