"""How this package says what is wrong: every problem of a plan in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in four parts: which object, which rule, what was found, what to do.

    Attributes:
        code: Stable kebab-case identifier of the rule, e.g. ``"ranks-diverge"``.
        name: FQN, argument or graph node the problem is about.
        dim: Tensor dimension, where there is one.
        axis: Mesh axis, where there is one.
        found: What was found.
        hint: What to do about it.
    """

    code: str
    name: str = ""
    dim: int | None = None
    axis: str | None = None
    found: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = self.name or "-"
        if self.dim is not None:
            where += f" dim {self.dim}"
        if self.axis is not None:
            where += f" axis {self.axis!r}"
        text = f"[{self.code}] {where}: {self.found}"
        return f"{text} ({self.hint})" if self.hint else text


class PlanError(ValueError):
    """A plan cannot be made or carried out.

    Args:
        problems: One problem or several; all of them are listed in the message, one a line.
        summary: A sentence that goes before the list.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        lines = [summary] if summary else []
        lines += [str(problem) for problem in self.problems]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.summary)
