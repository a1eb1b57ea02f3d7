"""One record for one thing that is wrong, and one error that carries all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the object, the rule, what was found, what to do.

    Attributes:
        code: Stable kebab-case id of the rule, for example ``"dim-out-of-range"``. Programs compare this.
        name: Fully qualified name, pattern or argument that the problem is about; ``""`` for the whole call.
        dim: Tensor dimension, where one is to blame.
        axis: Mesh axis, where one is to blame.
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
        where = [self.name] if self.name else []
        where += [f"dim {self.dim}"] if self.dim is not None else []
        where += [f"axis {self.axis!r}"] if self.axis is not None else []
        text = f"[{self.code}]"
        if where:
            text += f" {', '.join(where)}:"
        if self.found:
            text += f" {self.found}"
        if self.hint:
            text += f" -> {self.hint}"
        return text

    def named(self, name: str) -> Problem:
        """Return the problem with a name, where it has none: a caller knows which tensor a value belongs to."""
        return self if self.name else replace(self, name=name)


class PlanError(ValueError):
    """Every problem of one call, found before anything was changed or sent.

    Args:
        problems: One problem or several; the message lists them, one a line.
        summary: First line of the message; by default the number of problems, where there are several.

    Attributes:
        problems: All of them, in a deterministic order.
        summary: The first line.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        lines = [str(problem) for problem in self.problems]
        if not summary and len(lines) > 1:
            summary = f"{len(lines)} problems"
        super().__init__("\n".join([summary, *lines] if summary else lines))

    def __reduce__(self) -> tuple[object, ...]:  # errors travel between ranks
        return type(self), (self.problems, self.summary)


def raise_problems(problems: Iterable[Problem], summary: str = "") -> None:
    """Raise one ``PlanError`` with all of ``problems``; return when there are none."""
    problems = tuple(problems)
    if problems:
        raise PlanError(problems, summary)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise another package's ``PlanError`` as this package's: callers catch the error of the package they call.

    Each wheel carries its own copy of this class, so the same problems arrive under another type.
    """
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "PlanError" or isinstance(error, PlanError):
            raise
        raise PlanError(vars(error)["problems"], vars(error)["summary"]) from error
