"""The release tools, tried in a scratch clone: tags, wheels from a tag, changelogs, what is refused."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import repo
import wheelhouse
from scratch import Clone


def test_a_wheelhouse_is_built_from_a_release_tag_and_not_from_the_tree(clone: Clone) -> None:
    clone.release("shard-spec", "0.1.0")
    init = clone.path / "packages" / "shard-spec" / "src" / "shard_spec" / "__init__.py"
    init.write_text(init.read_text() + "\nAFTER_THE_TAG = True\n")

    code = """
import sys; sys.path.insert(0, "tools")
import repo, wheelhouse
tag = wheelhouse.oldest_tag("shard-spec", "shard-reshard")
print(tag, wheelhouse.build_released({"shard-spec": tag}))
"""
    tag, house = clone.python("-c", code).split()
    assert tag == "shard-spec-v0.1.0"
    (wheel,) = Path(house).glob("*.whl")
    assert wheel.name == "shard_spec-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert b"AFTER_THE_TAG" not in archive.read("shard_spec/__init__.py")
        assert "shard_spec/_shared/problems.py" in archive.namelist()  # the tag's tree has the link and its target


@pytest.mark.parametrize("name", list(repo.packages()))
def test_a_release_sets_version_changelog_and_tag_name(clone: Clone, name: str) -> None:
    folder = clone.path / "packages" / name
    before = (folder / "CHANGELOG.md").read_text()
    # Entries without an issue's number are sorted by their text.
    added = sorted(file.read_text().strip() for file in (folder / "changes").glob("*.added.md"))
    (folder / "changes").mkdir(exist_ok=True)  # git drops it after a release
    (folder / "changes" / "+thing.fixed.md").write_text("A thing\nof two lines.\n")
    clone.git("add", "--all")
    printed = clone.release(name, "minor")
    assert f"tag {name}-v0.2.0" in printed
    assert ("compat(shard-spec)" in printed) == (name == "shard-spec")  # it has dependents
    about = folder / "src" / name.replace("-", "_") / "__about__.py"
    assert about.read_text() == '__version__ = "0.2.0"\n'
    head, mark, older = before.partition("<!-- releases -->\n")
    text = (folder / "CHANGELOG.md").read_text()
    section = "### Added\n\n" + "".join(f"- {entry}\n" for entry in added) + "\n" if added else ""
    assert text.startswith(f"{head}{mark}\n## [0.2.0] - 2026-12-01\n\n{section}### ")
    assert "\n### Fixed\n\n- A thing\n  of two lines.\n" in text
    assert text.endswith(older)
    assert clone.git("ls-files", str(folder / "changes")) == ""  # the next release starts with none


def test_an_empty_release_is_refused_and_changes_nothing(clone: Clone) -> None:
    clone.release("tp-styles", "0.1.0")
    assert "nothing to release" in clone.python("tools/release.py", "tp-styles", "minor", status=1)
    assert clone.git("status", "--porcelain") == ""


def test_a_change_whose_name_says_no_kind_is_refused(clone: Clone) -> None:
    (clone.path / "packages" / "tp-styles" / "changes" / "+thing.better.md").write_text("A thing.\n")
    assert "+thing.better.md" in clone.python("tools/release.py", "tp-styles", "0.1.0", status=1)


def test_closures_and_dependents_come_from_the_packages_own_files() -> None:
    assert repo.closure("shard-reshard") == ["shard-spec", "shard-reshard"]
    assert repo.closure("tp-ddp-bridge") == ["tp-ddp-bridge"]
    assert repo.dependents("shard-spec") == ["shard-reshard", "tp-styles"]
    assert repo.test_closure("tp-styles") == ["shard-spec", "tp-styles"]


def test_lower_bounds_are_read_as_written() -> None:
    assert wheelhouse.lower_bound("torch>=2.11") == "torch==2.11.*"
    assert wheelhouse.lower_bound("shard-spec>=0.1,<0.2") == "shard-spec==0.1.*"
    with pytest.raises(SystemExit, match="no lower bound"):
        wheelhouse.lower_bound("torch")


def test_a_pin_file_that_leaves_a_package_out_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("shard-spec==0.1.0\n")
    with pytest.raises(SystemExit, match=r"no version of .*tp-styles"):
        wheelhouse.read_pins(file)


def test_the_tags_of_one_commit_stand_beside_each_other(clone: Clone) -> None:
    """All first releases share a commit; each tree removes the one before."""
    tags = {name: f"{name}-v0.1.0" for name in ("shard-spec", "tp-styles")}
    for tag in tags.values():
        clone.git("tag", tag)
    code = f"import sys; sys.path.insert(0, 'tools'); import wheelhouse as w; print(*w.released_trees({tags}).values())"
    trees = clone.python("-c", code).split()
    assert [(Path(tree) / "packages" / name).is_dir() for tree, name in zip(trees, tags, strict=True)] == [True, True]


def test_the_published_pin_files_name_every_package() -> None:
    files = sorted((repo.ROOT / "docs" / "pins").glob("*.txt"))
    assert files, os.listdir(repo.ROOT / "docs")
    for file in files:
        assert list(wheelhouse.read_pins(file)) == list(repo.packages())
