"""Errors of this package beside the shared `PlanError`. Each is also the error of torch's own styles."""

from __future__ import annotations

from tp_styles._shared.problems import PlanError as PlanError
from tp_styles._shared.problems import Problem as Problem


class StyleInputError(PlanError, RuntimeError):
    """A module's input cannot be prepared (a `RuntimeError` in the first styles, and still one)."""


class StyleOutputError(PlanError, AssertionError):
    """A module's output cannot be prepared (an `AssertionError` in the first styles, and still one)."""


class StyleTypeError(PlanError, TypeError):
    """Arguments of a style or plan do not go together."""


class StyleModuleError(PlanError, NotImplementedError):
    """A style on an unsupported kind of module (a `NotImplementedError` in torch, and still one)."""


class CheckError(PlanError, RuntimeError):
    """The sharded module does not compute the same as the original on full weights."""
