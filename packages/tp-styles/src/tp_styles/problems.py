"""Errors of this package beside the shared `PlanError`; each is also the error that torch's own styles raise."""

from __future__ import annotations

from tp_styles._shared.problems import PlanError as PlanError
from tp_styles._shared.problems import Problem as Problem


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
