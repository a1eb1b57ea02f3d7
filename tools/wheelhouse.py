"""Wheels of this repository's packages: of the working tree, of release tags, of a pin file.

Standard library only. Wheels lie under `.nox/wheelhouse/`, in a folder named by what they were built from, so that a
session that comes later builds nothing again and never mixes two states of a package.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import repo

HOUSE = repo.ROOT / ".nox" / "wheelhouse"


def build_current(names: Sequence[str]) -> Path:
    """A folder with one wheel of each named package, as the working tree stands."""
    return _build({name: repo.packages()[name].path for name in names})


def build_released(tags: Mapping[str, str]) -> Path:
    """A folder with one wheel of each package, built from its given release tag."""
    trees = released_trees(tags)
    return _build({name: tree / "packages" / name for name, tree in trees.items()})


def build_for_pins(file: Path) -> Path:
    """A folder with the wheels that a pin file asks for: of release tags, or of the tree where none exists yet."""
    tagged: dict[str, str] = {}
    current: list[str] = []
    for name, version in read_pins(file).items():
        tag = repo.tag_name(name, version)
        if tag in repo.release_tags(name):
            tagged[name] = tag
        elif version == repo.packages()[name].version:
            current.append(name)
        else:
            raise SystemExit(
                f"{file}: {name}=={version} has no tag {tag} and is not the tree's {repo.packages()[name].version}"
            )
    trees = {name: tree / "packages" / name for name, tree in released_trees(tagged).items()}
    return _build(trees | {name: repo.packages()[name].path for name in current})


def read_pins(file: Path) -> dict[str, str]:
    """The siblings' versions in a constraints file; a pin file that leaves one out is refused."""
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([^\s#;]+)", file.read_text(), flags=re.MULTILINE))
    missing = [name for name in repo.packages() if name not in pinned]
    if missing:
        raise SystemExit(f"{file}: no version of {', '.join(missing)}")
    return {name: pinned[name] for name in repo.packages()}


def released_trees(tags: Mapping[str, str]) -> dict[str, Path]:
    """The tree of each tag, written out once."""
    trees = {}
    for name, tag in tags.items():
        commit = repo.git("rev-parse", f"{tag}^{{commit}}")
        into = HOUSE.parent / "released" / commit[:12]
        if not (into / tag).exists():  # a commit may have the tags of several packages
            repo.export_tag(tag, into)
        trees[name] = into / tag
    return trees


def not_admitted(package: str, version: str, trees: Mapping[str, Path]) -> dict[str, str]:
    """Released dependents whose requirement leaves `version` of `package` out, with what they ask."""
    from packaging.requirements import Requirement  # of nox, and of pytest

    refused = {}
    for name, tree in trees.items():
        released = repo.read_package(tree / "packages" / name)
        asked = [*released.requirements, *(r for _, extra in released.extras for r in extra)]
        requirements = [Requirement(r) for r in asked if repo.requirement_name(r) == package]
        outside = [str(r) for r in requirements if not r.specifier.contains(version, prereleases=True)]
        if outside:
            refused[name] = outside[0]
    return refused


def lower_bound(requirement: str) -> str:
    """`"torch>=2.11"` -> `"torch==2.11.*"`, as exact as the bound is written."""
    match = re.search(r">=\s*([0-9.]+)", requirement)
    if match is None:
        raise SystemExit(f"{requirement!r} has no lower bound")
    version = match.group(1)
    return f"{repo.requirement_name(requirement)}=={version}" + (".*" if version.count(".") < 2 else "")


def oldest_tag(name: str, for_package: str) -> str:
    """The oldest release tag of `name` that satisfies what `for_package` asks of it."""
    tags = repo.release_tags(name)
    requirement = next(r for r in repo.packages()[for_package].requirements if repo.requirement_name(r) == name)
    bound = re.search(r">=\s*([0-9.]+)", requirement)
    least = _key(bound.group(1)) if bound else []
    fitting = [tag for tag in tags if _key(tag.removeprefix(f"{name}-v")) >= least]
    if not fitting:
        raise SystemExit(
            f"oldest: no release tag of {name} fits {requirement!r}; release it first: nox -s release -- {name} minor"
        )
    return fitting[0]


def _key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _build(sources: Mapping[str, Path]) -> Path:
    state = "\n".join(f"{name} {repo.source_digest(path)}" for name, path in sorted(sources.items()))
    target = HOUSE / hashlib.sha256(state.encode()).hexdigest()[:16]
    if target.exists():
        return target
    HOUSE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOUSE) as fresh:
        uv = shutil.which("uv")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", fresh]
        build_wheel = [uv, "build", "--quiet", "--wheel", "--out-dir", fresh] if uv else pip
        for path in sources.values():
            subprocess.run([*build_wheel, str(path)], check=True)
        Path(fresh).rename(target)
        Path(fresh).mkdir()  # the context manager removes what it made
    return target
