"""Check who imports whom: packages share nothing by import except what they declare, and never a private module.

The contracts are written from the packages' own `pyproject.toml` and checked by import-linter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import repo

# Public submodules: what a design names as an address of its own beside the top level.
PUBLIC_SUBMODULES = ("accelerate", "legacy", "optimal", "planners", "specs", "vllm")


def contracts() -> str:
    """An import-linter configuration for the packages as they stand."""
    found = repo.packages()
    lines = [
        "[tool.importlinter]",
        "root_packages = " + _array(p.module for p in found.values()),
        "include_external_packages = true",
    ]
    for package in found.values():
        optional = [repo.requirement_name(r) for _, extra in package.extras for r in extra]
        allowed = {
            package.dist,
            *repo.closure(package.dist),
            *(s for o in optional if o in found for s in repo.closure(o)),
        }
        forbidden = [p.module for p in found.values() if p.dist not in allowed]
        if forbidden:
            lines += _contract(f"{package.dist} imports only what it declares", "forbidden", package.module, forbidden)
    for package in found.values():
        private = [m for m in _submodules(package) if m.split(".")[1] not in PUBLIC_SUBMODULES]
        others = [p.module for p in found.values() if p is not package]
        if private:
            lines += [
                "[[tool.importlinter.contracts]]",
                f'name = "only {package.dist} imports its private modules"',
                'type = "forbidden"',
                "source_modules = " + _array(others),
                "forbidden_modules = " + _array(private),
                'allow_indirect_imports = "true"',
            ]
    return "\n".join(lines) + "\n"


def _contract(name: str, kind: str, source: str, forbidden: list[str]) -> list[str]:
    return [
        "[[tool.importlinter.contracts]]",
        f'name = "{name}"',
        f'type = "{kind}"',
        f'source_modules = ["{source}"]',
        "forbidden_modules = " + _array(forbidden),
    ]


def _submodules(package: repo.Package) -> list[str]:
    """The modules directly under a package; a contract on one covers what lies below it."""
    folder = package.path / "src" / package.module
    names = {
        p.stem if p.suffix == ".py" else p.name
        for p in folder.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    return [f"{package.module}.{name}" for name in sorted(names - {"__init__", "__about__"})]


def _array(items: object) -> str:
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"  # type: ignore[attr-defined]  # any iterable of names


def main() -> int:
    sources = [str(p.path / "src") for p in repo.packages().values()]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pyproject.toml"
        config.write_text(contracts())
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(sources)}
        return subprocess.call(["lint-imports", "--no-logo", "--no-cache", "--config", str(config)], env=variables)


if __name__ == "__main__":
    sys.exit(main())
