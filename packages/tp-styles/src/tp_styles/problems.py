"""What is wrong with a plan, a call or a module, said in full and all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        code: Stable kebab-case name of the rule, for example `"dim-out-of-range"`.
        name: Fully qualified name, pattern or argument that it is about.
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
        where = [repr(self.name)] if self.name else []
        where += [f"dim {self.dim}"] if self.dim is not None else []
        where += [f"axis {self.axis!r}"] if self.axis is not None else []
        text = f"[{self.code}]"
        if where:
            text += " " + ", ".join(where)
        if self.found:
            text += f": {self.found}"
        if self.hint:
            text += f" -> {self.hint}"
        return text


class PlanError(ValueError):
    """Every problem of one plan or call; the message lists them one a line.

    Args:
        problems: One problem or several.
        summary: First line of the message.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem, summary: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.summary = summary
        if not summary:
            count = len(self.problems)
            summary = f"{count} problem{'' if count == 1 else 's'}"
        super().__init__("\n".join([summary, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.summary)


class StyleInputError(PlanError, RuntimeError):
    """A module's input cannot be prepared (a `RuntimeError` in the first styles, and still one)."""


class StyleOutputError(PlanError, AssertionError):
    """A module's output cannot be prepared (an `AssertionError` in the first styles, and still one)."""


class StyleTypeError(PlanError, TypeError):
    """A style or plan was written with arguments that do not go together."""


class StyleModuleError(PlanError, NotImplementedError):
    """A style was put on a kind of module it has no meaning for (a `NotImplementedError` in torch, and still one)."""


class CheckError(PlanError, RuntimeError):
    """The sharded module does not compute what the original does on full weights."""
