"""What can be wrong with a layout or a plan, and the one error that carries all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in the four parts every error of this project has.

    Attributes:
        code: Stable kebab-case id, for example ``"dim-out-of-range"``. Programs compare this.
        name: FQN or argument that the problem is about; ``""`` when it is about the whole.
        dim: Tensor dimension, where one is meant.
        axis: Mesh axis, where one is meant.
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
        place = [self.name] if self.name else []
        if self.dim is not None:
            place.append(f"dim {self.dim}")
        if self.axis is not None:
            place.append(f"axis {self.axis!r}")
        text = f"[{self.code}]"
        if place:
            text += f" {', '.join(place)}:"
        if self.found:
            text += f" {self.found}"
        if self.hint:
            text += f" -> {self.hint}"
        return text


class PlanError(ValueError):
    """Every problem of one call, found before anything was changed or sent.

    Attributes:
        problems: What is wrong, in a deterministic order.
        summary: The first line of the message.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        lines = [str(problem) for problem in self.problems]
        if not summary and len(lines) > 1:
            summary = f"{len(lines)} problems"
        super().__init__("\n".join(([summary] if summary else []) + lines))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.summary)


def raise_problems(problems: Iterable[Problem], summary: str = "") -> None:
    """Raise one ``PlanError`` with all of ``problems``, or return when there is none."""
    found = tuple(problems)
    if found:
        raise PlanError(found, summary)
