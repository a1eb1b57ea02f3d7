"""What a parameter becomes when another takes its place.

An optimizer that was built on the old object and not passed along would go on without moving anything, because the old
object never gets a gradient again. So the old object changes its class, and whatever touches it raises and says what to
do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor


class HandedOver(DTensor):
    """A DTensor parameter whose module now holds a local leaf."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            f"parameter {_name_among(args)!r}: this DTensor was replaced by a local leaf when the module was bridged "
            "for "
            "data parallelism. Pass the optimizer that still holds it, pre_dp_module_transform(module, "
            "optimizers=[optimizer]) (this can be done later, too), or build it afterwards; read the parameter from "
            "the "
            "module instead of keeping it"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub has no names
        return f"<HandedOver {stale_name(self)!r}>"


class HandedBack(torch.nn.Parameter):
    """A leaf whose module has its DTensor parameter back."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            f"parameter {_name_among(args)!r}: this local leaf was replaced by a DTensor when the bridge was undone. "
            "Pass "
            "the optimizer that still holds it, undo_dp_transform(module, optimizers=[optimizer]) (this can be done "
            "later, "
            "too); bridge the module again and wrap it in a new DDP to go on with data parallelism"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub has no names
        return f"<HandedBack {stale_name(self)!r}>"


def hand_over(parameter: DTensor, leaf: torch.nn.Parameter, name: str) -> None:
    """Turn a DTensor ``parameter`` into one that raises and that knows its ``leaf``."""
    parameter.__dict__.update(_stale_name=name, _stale_successor=leaf)
    parameter.__class__ = HandedOver


def hand_back(leaf: torch.nn.Parameter, parameter: torch.Tensor, name: str) -> None:
    """Turn a ``leaf`` into one that raises and that knows the DTensor ``parameter`` in its place."""
    leaf.__dict__.update(_stale_name=name, _stale_successor=parameter)
    leaf.__class__ = HandedBack


def successor(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that took the place of ``parameter``, through any number of bridgings and undoings."""
    while isinstance(parameter, HandedOver | HandedBack):
        parameter = parameter.__dict__["_stale_successor"]
    return parameter


def is_stale(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` was replaced."""
    return isinstance(parameter, HandedOver | HandedBack)


def stale_name(parameter: torch.Tensor) -> str:
    """The name that a replaced parameter had."""
    return str(parameter.__dict__.get("_stale_name", "?"))


def _name_among(args: Any) -> str:
    return next((stale_name(arg) for arg in args if isinstance(arg, HandedOver | HandedBack)), "?")
