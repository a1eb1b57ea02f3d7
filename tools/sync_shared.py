"""Copy the sources that packages share into each package that uses them; ``--check`` compares instead.

Every wheel stands alone, so what several packages need is copied, from one source: `tools/shared/*.py`. A package
takes part by having `src/<module>/_shared/<name>.py`; ``sync_shared.py PACKAGE NAME ...`` adds modules, with what they
import.
Nothing under `_shared` is edited by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import repo

SHARED = Path(__file__).resolve().parent / "shared"
INIT = '"""Copies of the sources in tools/shared; edit them there and run tools/sync_shared.py."""\n'
# A package that builds on a sibling raises the sibling's error: one `except PlanError` then catches both.
SIBLING_PROBLEMS = '''"""The problem record and the error of {sibling}, on which this package builds."""

from {module} import PlanError as PlanError
from {module} import Problem as Problem
'''


def expected(package: repo.Package, added: tuple[str, ...] = ()) -> dict[Path, str]:
    """Return path -> text of every file that should lie in a package's `_shared` folder."""
    folder = package.path / "src" / package.module / "_shared"
    present = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    names = _closure(present | set(added))
    if not names:
        return {}
    files = {folder / "__init__.py": INIT}
    for name in names:
        files[folder / f"{name}.py"] = (SHARED / f"{name}.py").read_text()
    siblings = [name for name in repo.closure(package.dist) if name != package.dist]
    if siblings and "problems" in names:
        text = SIBLING_PROBLEMS.format(sibling=siblings[0], module=repo.packages()[siblings[0]].module)
        files[folder / "problems.py"] = text
    return files


def _closure(names: set[str]) -> list[str]:
    """Return the modules and all that they import from beside them."""
    done: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        done.add(name)
        if not (SHARED / f"{name}.py").exists():
            sys.exit(f"tools/shared has no {name}.py; it has {', '.join(sorted(p.stem for p in SHARED.glob('*.py')))}")
        todo |= set(re.findall(r"^from \.(\w+) import", (SHARED / f"{name}.py").read_text(), re.MULTILINE)) - done
    return sorted(done)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    added = tuple(a for a in arguments if not a.startswith("-"))
    wrong = compared = 0
    for package in repo.packages().values():
        files = expected(package, added[1:] if added and added[0] == package.dist else ())
        for path, text in files.items():
            compared += 1
            if path.exists() and path.read_text() == text:
                continue
            wrong += 1
            print(f"{path.relative_to(repo.ROOT)}: {'differs from tools/shared' if check else 'written'}")
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    print(f"shared sources: {compared} copies, {wrong} {'differ' if check else 'written'}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
