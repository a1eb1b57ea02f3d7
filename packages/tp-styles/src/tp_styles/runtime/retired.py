"""What becomes of a parameter when another takes its place: whoever still trains it is told.

An optimizer made before would read no gradient of it ever again and leave the module's own parameter where it is,
without a word. Reading the values of a retired parameter stays allowed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tp_styles.problems import PlanError, Problem

_GRAD: Any = torch.Tensor.grad  # every optimizer reads it before it does anything


class Retired:
    """Mixed into the class of a parameter that no module holds any more."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRAD.__get__ and "_retired" in vars(args[0]):  # a copy knows nothing, and may have a gradient
            name, found, hint = vars(args[0])["_retired"]
            raise PlanError(Problem("parameter-replaced", name, found=found, hint=hint))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]  # the tensor's


@functools.cache
def _retired(kind: type) -> type:
    return type(f"Retired{kind.__name__}", (Retired, kind), {"__slots__": (), "__module__": __name__})


def retire(parameter: torch.Tensor, name: str, found: str, hint: str) -> None:
    """From now on an error, with these words, for whoever asks for the gradient of a parameter."""
    parameter.__dict__["_retired"] = (name, found, hint)
    if not isinstance(parameter, Retired):
        parameter.__class__ = _retired(type(parameter))


def is_retired(parameter: torch.Tensor) -> bool:
    """True if another took the place of a parameter."""
    return isinstance(parameter, Retired)
