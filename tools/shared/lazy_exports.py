"""Names of a package, imported at their first use: importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def lazy_exports(
    package: str, homes: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: ``__name__`` of the package.
        homes: Module below the package -> its names.
        submodules: Public modules, imported when they are named.

    Example:
        ``__getattr__, __dir__ = lazy_exports(__name__, {"api": ("compile", "Step")}, ("legacy",))``
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}
    modules = frozenset(submodules)

    def get(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next access is direct
        return value

    def names() -> list[str]:
        return sorted({*home_of, *modules, "__version__"})

    return get, names
