"""Link into each package's `_shared` the files of `tools/shared` that it uses, and no others.

    python tools/shared_links.py           fails where a link is missing, or where nothing needs it
    python tools/shared_links.py --write   makes and removes links, after an import of a shared module came or went

A file that a package holds itself, as shard-reshard's `_shared/problems.py`, stands in the place of the shared one.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import repo

SHARED = repo.ROOT / "tools" / "shared"
# In a package: `from x._shared.norms import y`, `from x._shared import consensus`, and "_shared.norms" of lazy exports.
_OUTSIDE = re.compile(r"\b_shared(?:\.(\w+)| import ([\w, ]+))")
_INSIDE = re.compile(r"^from \.(\w+) import|joinpath\(\"([\w.]+)\"\)", re.MULTILINE)


def folder_of(package: repo.Package) -> Path:
    return package.path / "src" / package.module / "_shared"


def used(package: repo.Package) -> set[str]:
    """Names of the files that a package's sources import, and of those that these files need."""
    folder = folder_of(package)
    sources = [file for file in folder.parent.rglob("*.py") if folder not in file.parents]
    names, missing = {"__init__.py"}, _names(_OUTSIDE, sources)
    while missing:
        names |= missing
        own = [folder / name if _is_own(folder / name) else SHARED / name for name in missing]
        missing = _names(_INSIDE, own) - names
    return names


def differences(package: repo.Package) -> tuple[set[str], set[str]]:
    """Names of links that a package lacks, and of those that it does not need or that lead elsewhere."""
    folder = folder_of(package)
    present = {file.name for file in folder.iterdir() if file.name != "__pycache__"}
    right = {name for name in present if _is_own(folder / name) or folder / name == link_of(folder / name)}
    return used(package) - right, present - (used(package) & right)


def link_of(place: Path) -> Path | None:
    """The place itself if it is a relative link to the shared file of its name."""
    target = Path(*[".."] * 5, "tools", "shared", place.name)
    return place if place.is_symlink() and place.readlink() == target and place.exists() else None


def write(package: repo.Package) -> None:
    """Make and remove links until `differences` are none."""
    missing, needless = differences(package)
    for name in needless:
        (folder_of(package) / name).unlink()
    for name in missing:
        (folder_of(package) / name).symlink_to(Path(*[".."] * 5, "tools", "shared", name))


def _names(pattern: re.Pattern[str], files: list[Path]) -> set[str]:
    texts = [file.read_text() for file in files if file.suffix == ".py"]
    groups = " ".join(group for text in texts for match in pattern.findall(text) for group in match)
    return {name if "." in name else f"{name}.py" for name in re.findall(r"[\w.]+", groups)}


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make and remove links")
    is_writing, wrong = parser.parse_args().write, 0
    for package in repo.packages().values():
        missing, needless = differences(package)
        wrong += len(missing | needless)
        print(f"{package.dist}: {len(used(package))} shared files, lacks {sorted(missing)}, not {sorted(needless)}")
        if is_writing:
            write(package)
    return 1 if wrong and not is_writing else 0


if __name__ == "__main__":
    sys.exit(main())
