"""Parameters whose place others have taken: whoever still asks for their gradients is told.

A list of parameters that was made before the first call, or an optimizer that is not passed to the step, holds objects
that no gradient reaches. `clip_grad_norm_` of such a list clips nothing, such an optimizer trains nothing, and neither
says so. Values of these parameters can still be read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_partition._torch_compat import pytree
from dp_partition.problems import PlanError, Problem

_GRAD: Any = torch.Tensor.grad  # whoever works on gradients reads it before anything else


class Retired:
    """Mixed into the class of a parameter."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRAD.__get__ and "_retired" in vars(args[0]):  # a copy knows nothing, and may have a gradient
            raise PlanError(vars(args[0])["_retired"])
        try:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]  # the tensor's
        except TypeError as error:
            if "Multiple dispatch failed" not in str(error):
                raise
            leaves = pytree.tree_leaves((args, kwargs))
            said = [vars(leaf)["_retired"] for leaf in leaves if isinstance(leaf, Retired) and "_retired" in vars(leaf)]
            if not said:
                raise
            raise PlanError(said[0]) from error  # a value that a trace would burn in


@functools.cache
def _retired(kind: type) -> type:
    return type(f"Retired{kind.__name__}", (Retired, kind), {"__slots__": (), "__module__": __name__})


def retire(parameter: torch.Tensor, problem: Problem) -> None:
    """From now on this error for whoever asks for the gradient of a parameter."""
    parameter.__dict__["_retired"] = problem
    if not isinstance(parameter, Retired):
        parameter.__class__ = _retired(type(parameter))


@contextmanager
def retired(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Within the block others stand in the places of these parameters: a step that is traced has to see those."""
    kinds = [(fqn, p, type(p)) for fqn, p in parameters if not isinstance(p, Retired)]
    found = "it is reached through a list or an attribute that the step does not get as an argument"
    hint = "ask the module that is passed to the step: model.parameters()"
    for fqn, parameter, _ in kinds:
        retire(parameter, Problem("parameter-in-closure", fqn, found=found, hint=hint))
    try:
        yield
    finally:
        for _, parameter, kind in kinds:
            parameter.__class__ = kind
            del parameter.__dict__["_retired"]
