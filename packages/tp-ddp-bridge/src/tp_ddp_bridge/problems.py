"""What is wrong with a plan, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a plan from being carried out.

    Attributes:
        code: Stable kebab-case identifier, for programs.
        name: Fully qualified name of the parameter, or the argument, that the problem is about.
        dim: Tensor dimension, if one is to blame.
        axis: Mesh axis, if one is to blame.
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
        place = self.name or "(module)"
        if self.dim is not None:
            place += f", dim {self.dim}"
        if self.axis is not None:
            place += f", axis {self.axis!r}"
        text = f"[{self.code}] {place}"
        if self.found:
            text += f": {self.found}"
        if self.hint:
            text += f"; {self.hint}"
        return text


class PlanError(ValueError):
    """A plan that cannot be carried out; the message has one line for every problem.

    Attributes:
        problems: Every problem that was found, in the order of the module's parameters.
        summary: The first line of the message.
    """

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        lines = [f"- {problem}" for problem in self.problems]
        super().__init__("\n".join([summary, *lines] if summary else lines))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.summary)
