"""Names and cells of a Python function: the only shared source that inspects functions."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any


def contents(cell: types.CellType, empty: Any = None) -> Any:
    """Return what a closure's cell holds; ``empty`` if nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


def names_used(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code."""
    try:
        closure = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no Python function, or a cell is empty
        return frozenset()
    return frozenset([*closure.globals, *closure.builtins, *closure.unbound, *closure.nonlocals])
