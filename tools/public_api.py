"""The packages' public names, listed with their signatures.

    python tools/public_api.py           docs/api/*.txt are what the sources export   (nox -s lint)
    python tools/public_api.py --write   write them

Reads sources with griffe and imports nothing.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator

import griffe
import repo

LISTS = repo.ROOT / "docs" / "api"


def load(package: repo.Package) -> griffe.Module:
    """Read a package's sources."""
    module = griffe.load(package.module, search_paths=[str(package.path / "src")])
    if not isinstance(module, griffe.Module):
        raise TypeError(f"{package.module} is not a module")
    return module


def exported(module: griffe.Module) -> dict[str, griffe.Object | griffe.Alias]:
    """Return the members that `__all__` names, and those of public submodules as `planners.MegatronPlanner`."""
    members = {name: module.members[name] for name in sorted(map(str, module.exports or []))}
    for below in repo.PUBLIC_SUBMODULES:
        inner = module.members.get(below)
        if isinstance(inner, griffe.Module):
            members |= {f"{below}.{name}": member for name, member in exported(inner).items() if name not in members}
    return members


def _lines(name: str, member: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield a line for a public name, and for each public method and attribute of a class."""
    try:
        target = member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError as error:
        yield f"{name} = {error.alias.target_path}"
        return
    if isinstance(target, griffe.Class):
        yield f"class {name}" + (f"({', '.join(map(str, target.bases))})" if target.bases else "")
        for key, inner in sorted(target.members.items()):
            if key == "__init__" or not key.startswith("_"):
                yield from _lines(f"{name}.{key}", inner)
    elif isinstance(target, griffe.Function):
        text: str = target.signature(name=name)
        yield f"def {text}"
    elif isinstance(target, griffe.Attribute):
        yield f"{name}: {target.annotation}" if target.annotation is not None else name
    else:
        yield name


def check(write: bool) -> int:
    """Compare the lists with the sources, or write them."""
    wrong = 0
    for package in repo.packages().values():
        lines = [line for name, member in exported(load(package)).items() for line in _lines(name, member)]
        file, expected = LISTS / f"{package.dist}.txt", "\n".join(lines) + "\n"
        if write:
            LISTS.mkdir(parents=True, exist_ok=True)
            file.write_text(expected)
        committed = file.read_text() if file.exists() else ""
        changes = list(difflib.unified_diff(committed.splitlines(), lines, n=0, lineterm=""))
        if changes:
            wrong += 1
            print(f"{file.name} is not what {package.dist} exports; if that is meant: tools/public_api.py --write")
            print("\n".join(changes[2:]))
    print(f"public API: {len(repo.packages())} packages, {wrong} differ from their lists")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check("--write" in sys.argv[1:]))
