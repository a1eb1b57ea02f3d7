"""Prepare a release of one package: new version, changelog by towncrier, tag name. Commits and pushes nothing.

python tools/release.py shard-spec minor        (nox -s release -- shard-spec minor)
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys

import repo


def release(package: repo.Package, segment: str, day: str) -> None:
    """Set a package's version and write its changelog's section from `changes/`."""
    if not list(package.changes.glob("*.md")):  # towncrier itself would write "No significant changes"
        raise SystemExit(
            f"release: nothing lies in {package.changes.relative_to(repo.ROOT)}, so there is nothing to release"
        )
    if segment != package.version:
        # hatchling itself, since `hatch version` makes an environment first, and under nox in the wrong place
        subprocess.run([sys.executable, "-m", "hatchling", "version", segment], cwd=package.path, check=True)
    news = ["--dir", str(package.path), "--name", package.dist, "--version", package.version, "--date", day]
    config = str(repo.ROOT / "tools" / "towncrier.toml")
    subprocess.run([sys.executable, "-m", "towncrier", "build", "--yes", "--config", config, *news], check=True)
    tag = repo.tag_name(package.dist, package.version)
    print(f"{package.dist} {package.version}")
    for name in repo.dependents(package.dist):
        print(f"  before tagging: nox -s 'compat({package.dist})' runs the released {name} against it")
    print(f"  then: git commit -am 'Release {tag}' && git tag {tag}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=list(repo.packages()))
    parser.add_argument("segment", help="major, minor, patch, or the version itself (the first release: 0.1.0)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="default: today")
    arguments = parser.parse_args(argv)
    release(repo.packages()[arguments.package], arguments.segment, arguments.date)
    return 0


if __name__ == "__main__":
    sys.exit(main())
