"""Every package links to the one folder of shared sources."""

from __future__ import annotations

import re

import repo


def test_every_package_links_to_the_one_folder() -> None:
    own = {"shard-reshard": {"problems.py"}}  # it raises shard-spec's classes
    compared = 0
    for package in repo.packages().values():
        folder = package.path / "src" / package.module / "_shared"
        for file in folder.glob("*.py"):
            compared += 1
            linked = file.resolve() == repo.ROOT / "tools" / "shared" / file.name
            assert linked == (file.name not in own.get(package.dist, ())), file
            text = file.read_text()
            names = {f.stem for f in folder.glob("*.py")}
            missing = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE)) - names
            assert not missing, f"{file} imports {missing}, which {folder} does not hold"
    assert compared >= 5 * 4
