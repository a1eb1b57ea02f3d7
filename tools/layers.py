"""Check who imports whom with import-linter; its contracts are written from `structure.toml` and the `pyproject.toml`s.

Imports go down the layers of a package, also those inside functions; modules beside each other import in no circle. A
package imports only siblings that it declares, and never another's private module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import repo


def contracts() -> Iterator[dict[str, Any]]:
    """Yield the four contracts of each package: layers, circles, declared siblings, private modules."""
    packages = repo.packages()
    settings = tomllib.loads((repo.ROOT / "tools" / "structure.toml").read_text())
    modules = [package.module for package in packages.values()]
    for package in packages.values():
        declared = repo.closure(package.dist, *package.extras)
        yield {
            "name": f"{package.dist}: imports go down its layers",
            "type": "layers",
            "containers": [package.module],
            "layers": [" | ".join(layer) for layer in settings[package.dist]["layers"]],
            "exhaustive": "true",
            "exhaustive_ignores": ["__about__"],
        }
        yield {
            "name": f"{package.dist}: no circles of siblings",
            "type": "acyclic_siblings",
            "ancestors": [package.module],
            "ignore_imports": settings[package.dist].get("sibling_circles", []),
            "unmatched_ignore_imports_alerting": "warn",
        }
        yield {
            "name": f"{package.dist}: imports only what it declares",
            "type": "forbidden",
            "source_modules": [package.module],
            "forbidden_modules": [p.module for name, p in packages.items() if name not in declared],
        }
        yield {
            "name": f"{package.dist}: only it imports its private modules",
            "type": "forbidden",
            "source_modules": [module for module in modules if module != package.module],
            "forbidden_modules": [
                f"{package.module}.{name}"
                for layer in settings[package.dist]["layers"]
                for name in layer
                if name not in repo.PUBLIC_SUBMODULES
            ],
            "allow_indirect_imports": "true",
        }


def configuration() -> str:
    """Return the contracts as a file that import-linter reads."""
    roots = [package.module for package in repo.packages().values()]
    lines = ["[tool.importlinter]", f"root_packages = {json.dumps(roots)}", "exclude_type_checking_imports = true"]
    for contract in contracts():
        lines.append("[[tool.importlinter.contracts]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in contract.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    sources = [str(package.path / "src") for package in repo.packages().values()]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pyproject.toml"
        config.write_text(configuration())
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(sources)}
        return subprocess.call(["lint-imports", "--no-logo", "--no-cache", "--config", str(config)], env=variables)


if __name__ == "__main__":
    sys.exit(main())
