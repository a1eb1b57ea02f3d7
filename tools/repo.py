"""Facts about this repository that its sessions share: the packages, what they need, and their source files.

Standard library only: `noxfile.py` and the scripts beside this file import it where nothing is installed.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Modules that users import by their own address, `shard_spec.planners` for example; all others are private.
PUBLIC_SUBMODULES = ("accelerate", "legacy", "optimal", "planners", "specs", "engines")


@dataclass(frozen=True)
class Package:
    """One distribution of the repository, read from its `pyproject.toml`.

    Attributes:
        dist: Its name, `shard-spec` for example.
        path: Its folder.
        requirements: What it needs to be imported.
        extras: What its extras add, all of them together.
        test_requirements: What its tests of the extras need.
    """

    dist: str
    path: Path
    requirements: tuple[str, ...]
    extras: tuple[str, ...]
    test_requirements: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.dist.replace("-", "_")

    @property
    def version(self) -> str:
        return (self.path / "src" / self.module / "__about__.py").read_text().split('"')[1]

    @property
    def changes(self) -> Path:
        """The folder with one file for each change since the last release."""
        return self.path / "changes"


def requirement_name(requirement: str) -> str:
    """`"shard-spec>=0.1,<0.2"` -> `"shard-spec"`."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return match.group().lower().replace("_", "-")


def read_package(path: Path) -> Package:
    data: dict[str, Any] = tomllib.loads((path / "pyproject.toml").read_text())
    project = data["project"]
    extras = tuple(r for extra in project.get("optional-dependencies", {}).values() for r in extra)
    tests = tuple(data.get("dependency-groups", {}).get("test", ()))
    return Package(project["name"], path, tuple(project["dependencies"]), extras, tests)


@functools.cache
def packages() -> dict[str, Package]:
    """Every package, by distribution name, dependencies before dependents."""
    by_dist = {p.dist: p for p in map(read_package, sorted((ROOT / "packages").iterdir()))}
    needs = {dist: set(map(requirement_name, p.requirements)) & by_dist.keys() for dist, p in by_dist.items()}
    return {dist: by_dist[dist] for dist in TopologicalSorter(needs).static_order()}


def closure(*requirements: str) -> list[str]:
    """The packages of this repository that requirements lead to: `shard-reshard` leads to shard-spec and to itself."""
    names = set(map(requirement_name, requirements))
    for name, package in reversed(packages().items()):
        if name in names:
            names.update(map(requirement_name, package.requirements))
    return [name for name in packages() if name in names]


def dependents(dist: str) -> list[str]:
    """The packages that need `dist`, directly or through an extra."""
    needs = {
        name: map(requirement_name, (*p.requirements, *p.extras)) for name, p in packages().items() if name != dist
    }
    return sorted(name for name, needed in needs.items() if dist in needed)


def git(*args: str, cwd: Path | None = None) -> str:
    return subprocess.run(["git", *args], cwd=cwd or ROOT, check=True, capture_output=True, text=True).stdout.strip()


def source_files(path: Path) -> Iterator[Path]:
    """The files under a folder, and those that links lead to; caches and built files are left out."""
    ignored = {"__pycache__", "dist", ".pytest_cache", ".mypy_cache", ".hypothesis"}
    for folder, names, files in os.walk(path):  # links to files, as those in `_shared`, are read as what they lead to
        names[:] = sorted(set(names) - ignored)
        yield from (Path(folder, file) for file in sorted(files))
