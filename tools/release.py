"""Prepare a release of one package: new version, dated changelog section, tag name. Commits and pushes nothing.

python tools/release.py shard-spec minor        (nox -s release -- shard-spec minor)
python tools/release.py all 0.1.0 --dry-run     every package, in a scratch clone: commits, tags, wheels of the pin file
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

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


def dry_run(version: str, day: str) -> int:
    """Release every package in a clone of what is committed, then build the newest pin file's wheels from the tags."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        repo.git("clone", "--quiet", "--no-hardlinks", str(repo.ROOT), str(clone))
        repo.git("config", "user.name", "release", cwd=clone)
        repo.git("config", "user.email", "release@example.org", cwd=clone)
        for name in repo.packages():
            subprocess.run(
                [sys.executable, "tools/release.py", name, version, "--date", day],
                cwd=clone,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            tag = repo.tag_name(name, version)
            repo.git("commit", "--quiet", "--all", "--message", f"Release {tag}", cwd=clone)
            repo.git("tag", tag, cwd=clone)
        build = """
import sys; sys.path.insert(0, "tools")
import pathlib, repo, wheelhouse
pins = sorted((repo.ROOT / "docs" / "pins").glob("*.txt"))[-1]
for name, version in wheelhouse.read_pins(pins).items():
    assert repo.tag_name(name, version) in repo.release_tags(name), f"{pins.name}: no tag of {name} {version}"
for wheel in sorted(wheelhouse.build_for_pins(pins).glob("*.whl")):
    print(f"{pins.name}: {wheel.name}")
"""
        subprocess.run([sys.executable, "tools/lint_changelogs.py"], cwd=clone, check=True)
        print(repo.git("tag", "--list", cwd=clone))
        return subprocess.run([sys.executable, "-c", build], cwd=clone, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=[*repo.packages(), "all"])
    parser.add_argument("segment", help="major, minor, patch, or the version itself (the first release: 0.1.0)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="default: today")
    parser.add_argument("--dry-run", action="store_true", help="with all: in a scratch clone, with commits and tags")
    arguments = parser.parse_args(argv)
    if arguments.dry_run != (arguments.package == "all"):
        parser.error("`all` goes with --dry-run: each release is its own commit")
    if arguments.dry_run:
        return dry_run(arguments.segment, arguments.date)
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
