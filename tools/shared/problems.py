"""One record for one problem, and one error for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Problem:
    """One problem: the object, the rule, the finding, the remedy.

    Attributes:
        code: Stable kebab-case id of the rule, for example ``"dim-out-of-range"``. Programs compare this.
        name: Fully qualified name, pattern or argument of the problem; ``""`` for the whole call.
        dim: Tensor dimension, if one is to blame.
        axis: Mesh axis, if one is to blame.
        found: The finding.
        hint: The remedy.
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
        """Return the problem with a name if it has none: only a caller knows the name of a value's tensor."""
        return self if self.name else replace(self, name=name)


class PlanError(ValueError):
    """All problems of one call, found before any change or message.

    Args:
        problems: One problem or several; the message lists them, one a line.
        summary: First line of the message; by default the number of problems, if there are several.

    Attributes:
        problems: All of them, in a deterministic order.
        summary: The first line.
    """

    problems: tuple[Problem, ...]
    _is_plan_error = True  # `own_errors` of any package reads this: each wheel carries its own copy of this class

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        lines = [str(problem) for problem in self.problems]
        if not summary and len(lines) > 1:
            summary = f"{len(lines)} problems"
        super().__init__("\n".join([summary, *lines] if summary else lines))

    def __reduce__(self) -> tuple[object, ...]:  # errors are sent between ranks
        return type(self), (self.problems, self.summary)


def raise_problems(problems: Iterable[Problem], summary: str = "") -> None:
    """Raise one ``PlanError`` with all of ``problems``; return when there are none."""
    problems = tuple(problems)  # a generator is read once
    if problems:
        raise PlanError(problems, summary)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise another package's ``PlanError`` as this package's: callers catch the error of the package they call.

    Each wheel carries its own copy of the class, so tp-styles that calls shard-spec meets another type with the same
    problems. Subclasses count too; their own type is the cause of what is raised.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, PlanError) or not getattr(error, "_is_plan_error", False):
            raise
        raise PlanError(vars(error)["problems"], vars(error)["summary"]) from error
