"""Releases: prepare one, and find those that are there. Commits and pushes nothing.

    python tools/release.py shard-spec minor        (nox -s release -- shard-spec minor)

A release of shard-spec is a tag `shard-spec-v0.1.0`. Preparing one sets the version, lets towncrier write the section
of the changelog from `changes/`, and prints the tag's name.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

import repo


def tag_name(dist: str, version: str) -> str:
    return f"{dist}-v{version}"


def tags(dist: str) -> list[str]:
    """Tags of released versions of `dist`, oldest first."""
    return repo.git("tag", "--list", f"{dist}-v*", "--sort=version:refname").split()


def at_tag(dist: str, tag: str) -> str:
    """The requirement that installs `dist` as it was released under `tag`."""
    return f"{dist} @ git+{repo.ROOT.as_uri()}@{tag}#subdirectory=packages/{dist}"


def admits(dependent: repo.Package, package: str, version: str) -> bool:
    """Tell whether all that `dependent` and its extras ask of `package` admits `version` of it."""
    from packaging.requirements import Requirement  # nox and pytest bring it

    asked = [Requirement(r) for r in (*dependent.requirements, *dependent.extras)]
    return all(r.specifier.contains(version, prereleases=True) for r in asked if r.name == package)


def oldest_tag(dist: str, dependent: str) -> str:
    """The oldest release of `dist` that `dependent` admits.

    Raises:
        SystemExit: No release of `dist` is admitted.
    """
    for tag in tags(dist):
        if admits(repo.packages()[dependent], dist, tag.removeprefix(f"{dist}-v")):
            return tag
    raise SystemExit(f"no release of {dist} is one that {dependent} admits; first: nox -s release -- {dist} minor")


def lower_bound(requirement: str) -> str:
    """`"torch>=2.11"` -> `"torch==2.11.*"`, as exact as the bound is written."""
    match = re.search(r">=\s*([0-9.]+)", requirement)
    if match is None:
        raise SystemExit(f"{requirement!r} has no lower bound")
    version = match.group(1)
    return f"{repo.requirement_name(requirement)}=={version}" + (".*" if version.count(".") < 2 else "")


def pinned(file: Path) -> list[str]:
    """Requirements of the packages that a pin file names: release tags, or folders where the tree has the version.

    Raises:
        SystemExit: The file leaves a package out, or names a version that is neither released nor the tree's.
    """
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^\s#;]+)", file.read_text(), flags=re.MULTILINE))
    if missing := [name for name in repo.packages() if name not in pins]:
        raise SystemExit(f"{file}: no version of {', '.join(missing)}")
    requirements = []
    for name, package in repo.packages().items():
        tag = tag_name(name, pins[name])
        if tag in tags(name):
            requirements.append(at_tag(name, tag))
        elif pins[name] == package.version:
            requirements.append(str(package.path))
        else:
            raise SystemExit(f"{file}: {name}=={pins[name]} has no tag {tag} and is not the tree's {package.version}")
    return requirements


def release(package: repo.Package, segment: str, day: str) -> None:
    """Set a package's version and write its changelog's section from `changes/`."""
    if not list(package.changes.glob("*.md")):  # towncrier itself would write "No significant changes"
        changes = package.changes.relative_to(repo.ROOT)
        raise SystemExit(f"release: nothing lies in {changes}, so there is nothing to release")
    if segment != package.version:
        # hatchling itself: `hatch version` makes an environment first, under nox in the wrong place.
        subprocess.run([sys.executable, "-m", "hatchling", "version", segment], cwd=package.path, check=True)
    news = ["--dir", str(package.path), "--name", package.dist, "--version", package.version, "--date", day]
    config = str(repo.ROOT / "tools" / "towncrier.toml")
    subprocess.run([sys.executable, "-m", "towncrier", "build", "--yes", "--config", config, *news], check=True)
    tag = tag_name(package.dist, package.version)
    print(f"{package.dist} {package.version}")
    for name in repo.dependents(package.dist):
        print(f"  before tagging: nox -s compat -- {package.dist} runs the released {name} against it")
    print(f"  then: git commit -am 'Release {tag}' && git tag {tag}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=list(repo.packages()))
    parser.add_argument("segment", help="major, minor, patch, or the version itself (the first release: 0.1.0)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="default: today")
    arguments = parser.parse_args()
    release(repo.packages()[arguments.package], arguments.segment, arguments.date)
