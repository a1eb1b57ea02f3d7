"""Names and cells of a Python function: the only shared source that inspects functions."""

from __future__ import annotations

import ast
import functools
import inspect
import symtable
import textwrap
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
    """Return the names of globals and attributes in a function's code, lambdas and comprehensions in it included."""
    try:
        closure = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no Python function, or a cell is empty
        return frozenset()
    own = frozenset([*closure.globals, *closure.builtins, *closure.unbound, *closure.nonlocals])
    return own | _names_in_source(function.__code__)


@functools.lru_cache(maxsize=4096)
def _names_in_source(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's source.

    None for the functions of an installed library: their sources are many and long.
    """
    if "site-packages" in code.co_filename or code.co_filename.startswith("<frozen"):
        return frozenset()
    try:
        source = textwrap.dedent(inspect.getsource(code))
        tree, tables = ast.parse(source), [symtable.symtable(source, code.co_filename, "exec")]
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or a part of a statement (a lambda)
        return frozenset()
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for table in tables:  # grows
        tables += table.get_children()
        names.update(name for name in table.get_identifiers() if table.lookup(name).is_global())
    return frozenset(names - set(code.co_freevars))  # those of the function around it look global here
