"""Facts about this repository that its sessions share: packages, their closures, their wheels and their tags.

Standard library only: `noxfile.py` and the scripts beside this file import it before any environment exists.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"  # the one place that pins torch for the repository's own sessions; packages declare lower bounds only
# What a design names as an address of its own beside a package's top level; other modules below it are private.
PUBLIC_SUBMODULES = ("accelerate", "legacy", "optimal", "planners", "specs", "engines")


@dataclass(frozen=True)
class Package:
    """One distribution of the repository, read from its `pyproject.toml`."""

    dist: str
    path: Path
    requirements: tuple[str, ...]
    extras: tuple[tuple[str, tuple[str, ...]], ...]
    test_requirements: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.dist.replace("-", "_")

    @property
    def version(self) -> str:
        about = (self.path / "src" / self.module / "__about__.py").read_text()
        return about.split('"')[1]

    @property
    def changes(self) -> Path:
        """What changed since the last release, a file each."""
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
    return Package(
        dist=project["name"],
        path=path,
        requirements=tuple(project["dependencies"]),
        extras=tuple((k, tuple(v)) for k, v in project.get("optional-dependencies", {}).items()),
        test_requirements=tuple(data.get("dependency-groups", {}).get("test", ())),
    )


@functools.cache
def packages() -> dict[str, Package]:
    """Every package, by distribution name, dependencies before dependents."""
    by_dist = {p.dist: p for p in map(read_package, sorted((ROOT / "packages").iterdir()))}
    ordered: dict[str, Package] = {}

    def visit(package: Package) -> None:
        for sibling in _siblings(package.requirements, by_dist):
            visit(by_dist[sibling])
        ordered.setdefault(package.dist, package)

    for package in by_dist.values():
        visit(package)
    return ordered


def _siblings(requirements: tuple[str, ...], among: dict[str, Package]) -> list[str]:
    return [name for name in map(requirement_name, requirements) if name in among]


def closure(dist: str) -> list[str]:
    """`dist` and every sibling that it needs, dependencies first."""
    names = {dist}
    for name in reversed(packages()):
        if name in names:
            names.update(_siblings(packages()[name].requirements, packages()))
    return [name for name in packages() if name in names]


def test_closure(dist: str) -> list[str]:
    """The closure, with the siblings that only the package's tests of its extras use."""
    package = packages()[dist]
    optional = _siblings(package.test_requirements, packages())
    names = {name for top in (dist, *optional) for name in closure(top)}
    return [name for name in packages() if name in names]


def dependents(dist: str) -> list[str]:
    """The siblings that need `dist`, directly or through an extra."""
    declaring = []
    for name, package in packages().items():
        requirements = (*package.requirements, *(r for _, extra in package.extras for r in extra))
        if name != dist and dist in map(requirement_name, requirements):
            declaring.append(name)
    return declaring


def git(*args: str, cwd: Path | None = None) -> str:
    return subprocess.run(["git", *args], cwd=cwd or ROOT, check=True, capture_output=True, text=True).stdout.strip()


def tag_name(dist: str, version: str) -> str:
    return f"{dist}-v{version}"


def release_tags(dist: str) -> list[str]:
    """Tags of released versions of `dist`, oldest first."""
    tags = git("tag", "--list", f"{dist}-v*").split()
    return sorted(tags, key=lambda tag: [int(n) for n in re.findall(r"\d+", tag.removeprefix(f"{dist}-v"))])


def export_tag(tag: str, into: Path) -> Path:
    """Write the tree of a tag under `into`, all or nothing. The working tree and its index are not touched."""
    archive = subprocess.run(["git", "archive", "--format=tar", tag], cwd=ROOT, check=True, capture_output=True).stdout
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as fresh, tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(Path(fresh) / "tree", filter="data")
        return (Path(fresh) / "tree").rename(into / tag)


def source_files(path: Path) -> Iterator[Path]:
    """The files under a folder, and those that links lead to. What tools leave there is left out."""
    ignored = {"__pycache__", "dist", ".pytest_cache", ".mypy_cache", ".hypothesis"}
    for folder, names, files in os.walk(path, followlinks=True):  # `_shared` is a link to tools/shared
        names[:] = sorted(set(names) - ignored)
        yield from (Path(folder, file) for file in sorted(files))


def source_digest(path: Path) -> str:
    """A hash of a folder's files: a wheel is built again only when they changed."""
    digest = hashlib.sha256()
    for file in source_files(path):
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
