"""Check the changelogs: every package has one in Keep-a-Changelog form, and its newest version is the package's."""

from __future__ import annotations

import re
import sys

import repo

HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def problems(dist: str, version: str, text: str, released: list[str]) -> list[str]:
    """What is wrong with one changelog; empty when it is good."""
    found = []
    if not text.startswith(f"# Changelog of {dist}\n"):
        found.append(f"the first line is not '# Changelog of {dist}'")
    headings = list(HEADING.finditer(text))
    if not headings or headings[0]["version"] != "Unreleased":
        found.append("the first section is not '## [Unreleased]'")
    versions = [h["version"] for h in headings[1:]]
    found += [f"version {h['version']} has no date" for h in headings[1:] if not h["date"]]
    if versions and versions[0] != version:
        found.append(f"newest version {versions[0]} is not the package's {version}")
    found += [f"tag {tag} has no section" for tag in released if tag.rsplit("-v", 1)[1] not in versions]
    found += [f"unknown kind of change {k!r}" for k in re.findall(r"^### (.+)$", text, re.MULTILINE) if k not in KINDS]
    return found


def main() -> int:
    wrong = 0
    for package in repo.packages().values():
        for problem in problems(
            package.dist, package.version, package.changelog.read_text(), repo.release_tags(package.dist)
        ):
            print(f"{package.changelog.relative_to(repo.ROOT)}: {problem}")
            wrong += 1
    print(f"changelogs: {len(repo.packages())} checked, {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
