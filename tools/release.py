"""Prepare a release of one package: new version, dated changelog section, tag name. Commits and pushes nothing.

python tools/release.py shard-spec minor        (nox -s release -- shard-spec minor)
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys

import repo

UNRELEASED = "## [Unreleased]\n"


def dated_changelog(text: str, version: str, day: str) -> str:
    """The changelog with what was unreleased under the new version."""
    head, found, rest = text.partition(UNRELEASED)
    if not found:
        raise SystemExit("release: the changelog has no '## [Unreleased]' section")
    body = rest.split("\n## [", 1)[0]
    if not body.strip():
        raise SystemExit("release: nothing stands under '## [Unreleased]', so there is nothing to release")
    return f"{head}{UNRELEASED}\n## [{version}] - {day}\n{rest}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=list(repo.packages()))
    parser.add_argument("segment", help="major, minor, patch, or the version itself (the first release: 0.1.0)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="default: today")
    arguments = parser.parse_args(argv)
    package = repo.packages()[arguments.package]
    before = package.changelog.read_text()
    dated_changelog(before, "0", arguments.date)  # refuses before anything is changed
    if arguments.segment != package.version:
        # hatchling itself, since `hatch version` makes an environment first, and under nox in the wrong place
        subprocess.run([sys.executable, "-m", "hatchling", "version", arguments.segment], cwd=package.path, check=True)
    package.changelog.write_text(dated_changelog(before, package.version, arguments.date))
    tag = repo.tag_name(package.dist, package.version)
    print(f"{package.dist} {package.version}")
    for name in repo.dependents(package.dist):
        print(f"  before tagging: nox -s 'compat({package.dist})' runs the released {name} against it")
    print(f"  then: git commit -am 'Release {tag}' && git tag {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
