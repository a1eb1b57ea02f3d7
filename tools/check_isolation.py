"""In an environment that holds one package's wheel: every public module imports, and no undeclared sibling is there.

python tools/check_isolation.py shard-spec
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from pathlib import Path

import repo


def main(dist: str) -> int:
    package = repo.packages()[dist]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch without numpy says so; we need none
    wrong = [
        f"{other} can be imported, but {dist} does not declare it"
        for other in (p.module for p in repo.packages().values() if p.dist not in repo.closure(dist))
        if importlib.util.find_spec(other)
    ]
    top = importlib.import_module(package.module)
    where = Path(top.__file__ or "")
    if repo.ROOT / "packages" in where.parents:
        wrong.append(f"{where} is the source tree, not an installed wheel")
    modules = [
        m.name for m in pkgutil.walk_packages(top.__path__, f"{package.module}.") if not m.name.endswith("__main__")
    ]
    hosts = {repo.requirement_name(r) for _, extra in package.extras for r in extra}
    for name in list(modules):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in hosts:
                raise
            modules.remove(name)  # the module of an extra, which nothing else imports
    missing = [name for name in top.__all__ if not hasattr(top, name)]
    wrong += [f"{package.module}.__all__ names {name}, which is not there" for name in missing]
    print("\n".join(wrong) or f"isolation: {dist} alone, {len(modules)} modules and {len(top.__all__)} public names")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
