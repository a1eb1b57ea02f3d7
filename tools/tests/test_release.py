"""Releases tried in a clone: tags, packages installed from a tag, changelogs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import release
import repo
from scratch import Clone


def test_a_package_is_installed_as_it_was_released_and_not_from_the_tree(clone: Clone, tmp_path: Path) -> None:
    clone.release("shard-spec", "0.1.0")
    init = clone.path / "packages" / "shard-spec" / "src" / "shard_spec" / "__init__.py"
    init.write_text(init.read_text() + "\nAFTER_THE_TAG = True\n")

    code = """
import subprocess, sys; sys.path.insert(0, "tools")
import release
tag = release.oldest_tag("shard-spec", "shard-reshard")
uv = ["uv", "pip", "install", "--no-deps", "--python", sys.executable, "--target", sys.argv[1]]
print(tag, subprocess.run([*uv, release.at_tag("shard-spec", tag)], check=True).returncode)
"""
    assert "shard-spec-v0.1.0 0" in clone.python("-c", code, str(tmp_path / "installed"))
    installed = tmp_path / "installed" / "shard_spec"
    assert "AFTER_THE_TAG" not in (installed / "__init__.py").read_text()
    assert (installed / "_shared" / "problems.py").is_file()  # the tag's tree has the link and its target


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
    assert ("compat -- shard-spec" in printed) == (name == "shard-spec")  # it has dependents
    about = folder / "src" / name.replace("-", "_") / "__about__.py"
    assert about.read_text() == '__version__ = "0.2.0"\n'
    head, mark, older = before.partition("<!-- releases -->\n")
    text = (folder / "CHANGELOG.md").read_text()
    section = (
        "### Added\n\n" + "".join(f"- {entry}\n".replace("\n", "\n  ").rstrip(" ") for entry in added) + "\n"
        if added
        else ""
    )
    assert text.startswith(f"{head}{mark}\n## [0.2.0] - 2026-12-01\n\n{section}### ")
    assert "- A thing\n  of two lines.\n" in text.partition("\n### Fixed\n\n")[2].partition("\n##")[0]
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
    assert repo.closure("shard-spec>=0.1", "tp-styles", "torch") == ["shard-spec", "tp-styles"]


def test_lower_bounds_are_read_as_written() -> None:
    assert release.lower_bound("torch>=2.11") == "torch==2.11.*"
    assert release.lower_bound("shard-spec>=0.1,<0.2") == "shard-spec==0.1.*"
    with pytest.raises(SystemExit, match="no lower bound"):
        release.lower_bound("torch")


def test_a_pin_file_that_leaves_a_package_out_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("shard-spec==0.1.0\n")
    with pytest.raises(SystemExit, match=r"no version of .*tp-styles"):
        release.pinned(file)


def test_a_pin_file_leads_to_tags_and_where_there_is_none_to_the_tree(clone: Clone) -> None:
    clone.git("tag", "tp-styles-v0.1.0")
    (clone.path / "pins.txt").write_text("".join(f"{name}==0.1.0\n" for name in repo.packages()))
    code = """
import pathlib, sys; sys.path.insert(0, "tools")
import release
print(*release.pinned(pathlib.Path(sys.argv[1])), sep="\\n")
"""
    lines = sorted(clone.python("-c", code, "pins.txt").splitlines())
    tagged = f"tp-styles @ git+{clone.path.as_uri()}@tp-styles-v0.1.0#subdirectory=packages/tp-styles"
    folders = [str(clone.path / "packages" / name) for name in sorted(repo.packages()) if name != "tp-styles"]
    assert lines == [*folders, tagged]
    (clone.path / "pins.txt").write_text("".join(f"{name}==0.7.0\n" for name in repo.packages()))
    assert "0.7.0 has no tag" in clone.python("-c", code, "pins.txt", status=1)


def test_the_published_pin_files_name_every_package() -> None:
    files = sorted((repo.ROOT / "docs" / "pins").glob("*.txt"))
    assert files
    for file in files:
        assert len(release.pinned(file)) == len(repo.packages())
