"""In an environment with wheels of some packages: every module of theirs imports, and no other sibling is there.

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


def problems(package: repo.Package) -> list[str]:
    """Import one installed package with its modules; returns what is wrong with it."""
    top = importlib.import_module(package.module)
    where = Path(top.__file__ or "")
    wrong = [f"{where} is the source tree, not a wheel"] * (repo.ROOT / "packages" in where.parents)
    hosts = set(map(repo.requirement_name, package.extras))
    names = [module.name for module in pkgutil.walk_packages(top.__path__, f"{package.module}.")]
    imported = 0
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except ModuleNotFoundError as error:
            if error.name not in hosts:
                raise
            # It is an extra's, and no other module imports it: tp_ddp_bridge.accelerate where accelerate is missing.
    missing = [name for name in top.__all__ if not hasattr(top, name)]
    wrong += [f"{package.module}.__all__ names {name}, which is not there" for name in missing]
    wrong += [f"{package.module} has no shared sources"] * (not any("._shared." in name for name in names))
    print(f"isolation: {package.dist} {package.version}, {imported} modules and {len(top.__all__)} public names")
    return wrong


def main(dists: list[str]) -> int:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch without numpy says so; we need none
    others = [package.module for dist, package in repo.packages().items() if dist not in repo.closure(*dists)]
    wrong = [f"{other} can be imported, but nothing declares it" for other in others if importlib.util.find_spec(other)]
    wrong += [problem for dist in dists for problem in problems(repo.packages()[dist])]
    print("\n".join(wrong), end="\n" * bool(wrong))
    return 1 if wrong or not dists else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
