"""The release tools, tried in a scratch clone: tags, wheels from a tag, dated changelogs, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import lint_changelogs  # noqa: E402
import release  # noqa: E402
import repo  # noqa: E402
import wheelhouse  # noqa: E402


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the repository as it is committed, with today's tools."""
    target = tmp_path / "clone"
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target), cwd=tmp_path)
    for tool in ("repo.py", "wheelhouse.py", "release.py", "lint_changelogs.py"):
        (target / "tools" / tool).write_text((ROOT / "tools" / tool).read_text())
    run("git", "config", "user.email", "release@example.org", cwd=target)
    run("git", "config", "user.name", "release", cwd=target)
    return target


def python_in(clone: Path, code: str) -> str:
    script = f"import sys; sys.path.insert(0, 'tools')\n{code}"
    return run(sys.executable, "-c", script, cwd=clone)


def test_a_wheelhouse_is_built_from_a_release_tag_and_not_from_the_tree(clone: Path) -> None:
    changelog = clone / "packages" / "shard-spec" / "CHANGELOG.md"
    changelog.write_text("# Changelog of shard-spec\n\n## [Unreleased]\n\n### Added\n\n- The layouts.\n")
    run(sys.executable, "tools/release.py", "shard-spec", "0.1.0", cwd=clone)
    run("git", "commit", "-qam", "Release shard-spec-v0.1.0", cwd=clone)
    run("git", "tag", "shard-spec-v0.1.0", cwd=clone)
    init = clone / "packages" / "shard-spec" / "src" / "shard_spec" / "__init__.py"
    init.write_text(init.read_text() + "\nAFTER_THE_TAG = True\n")

    code = """
import repo, wheelhouse
tag = wheelhouse.oldest_tag("shard-spec", "shard-reshard")
print(tag, wheelhouse.build_released({"shard-spec": tag}))
"""
    tag, house = python_in(clone, code).split()
    assert tag == "shard-spec-v0.1.0"
    (wheel,) = Path(house).glob("*.whl")
    assert wheel.name == "shard_spec-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert b"AFTER_THE_TAG" not in archive.read("shard_spec/__init__.py")


def test_all_first_releases_in_a_dry_run(clone: Path) -> None:
    """The pin file resolves against tags alone, and the repository that was cloned has none afterwards."""
    run("git", "commit", "-qam", "tools", "--allow-empty", cwd=clone)
    printed = run(sys.executable, "tools/release.py", "all", "0.1.0", "--dry-run", "--date", "2026-12-01", cwd=clone)
    for package in repo.packages().values():
        assert f"{package.dist}-v0.1.0\n" in printed
        assert f"{package.module}-0.1.0-py3-none-any.whl" in printed
    assert run("git", "tag", "--list", cwd=clone) == run("git", "tag", "--list", cwd=ROOT)
    assert run("git", "status", "--porcelain", cwd=clone) == ""


@pytest.mark.parametrize("name", ["shard-spec", "tp-styles"])
def test_a_release_sets_version_date_and_tag_name(clone: Path, name: str) -> None:
    changelog = clone / "packages" / name / "CHANGELOG.md"
    changelog.write_text(f"# Changelog of {name}\n\n## [Unreleased]\n\n### Fixed\n\n- A thing.\n")
    printed = run(sys.executable, "tools/release.py", name, "minor", "--date", "2026-12-01", cwd=clone)
    assert f"tag {name}-v0.2.0" in printed
    assert ("compat(shard-spec)" in printed) == (name == "shard-spec")  # it has dependents
    about = clone / "packages" / name / "src" / name.replace("-", "_") / "__about__.py"
    assert about.read_text() == '__version__ = "0.2.0"\n'
    text = changelog.read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Fixed\n\n- A thing.\n" in text
    assert lint_changelogs.problems(name, "0.2.0", text, [f"{name}-v0.2.0"]) == []


def test_an_empty_release_is_refused_and_changes_nothing(clone: Path) -> None:
    folder = clone / "packages" / "tp-styles"
    (folder / "CHANGELOG.md").write_text("# Changelog of tp-styles\n\n## [Unreleased]\n")
    done = subprocess.run(
        [sys.executable, "tools/release.py", "tp-styles", "minor"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "nothing to release" in done.stderr
    assert (folder / "src" / "tp_styles" / "__about__.py").read_text() == '__version__ = "0.1.0"\n'


@pytest.mark.parametrize(
    ("text", "version", "tags", "expected"),
    [
        ("# Changes\n\n## [Unreleased]\n", "0.1.0", [], "first line"),
        ("# Changelog of x\n\n## [0.1.0] - 2026-01-01\n", "0.1.0", [], "[Unreleased]"),
        ("# Changelog of x\n\n## [Unreleased]\n\n## [0.1.0]\n", "0.1.0", [], "no date"),
        ("# Changelog of x\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-01\n", "0.1.0", [], "newest version"),
        ("# Changelog of x\n\n## [Unreleased]\n", "0.1.0", ["x-v0.1.0"], "no section"),
        ("# Changelog of x\n\n## [Unreleased]\n\n### New\n", "0.1.0", [], "unknown kind"),
    ],
)
def test_each_fault_of_a_changelog_is_found(text: str, version: str, tags: list[str], expected: str) -> None:
    (problem,) = lint_changelogs.problems("x", version, text, tags)
    assert expected in problem


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


def test_the_tags_of_one_commit_stand_beside_each_other(clone: Path) -> None:
    """All first releases were of one commit, and each tree that was written removed the one before."""
    tags = {name: f"{name}-v0.1.0" for name in ("shard-spec", "tp-styles")}
    for tag in tags.values():
        run("git", "tag", tag, cwd=clone)
    found = python_in(clone, f"import wheelhouse\nprint(*wheelhouse.released_trees({tags}).values())").split()
    assert [(Path(tree) / "packages" / name).is_dir() for tree, name in zip(found, tags, strict=True)] == [True, True]


def test_the_published_pin_files_name_every_package() -> None:
    files = sorted((ROOT / "docs" / "pins").glob("*.txt"))
    assert files, os.listdir(ROOT / "docs")
    for file in files:
        assert list(wheelhouse.read_pins(file)) == list(repo.packages())


def test_the_changelog_of_a_release_keeps_what_came_before() -> None:
    text = "# Changelog of x\n\n## [Unreleased]\n\n### Added\n\n- b\n\n## [0.1.0] - 2026-01-01\n\n- a\n"
    new = release.dated_changelog(text, "0.2.0", "2026-02-02")
    assert new.index("[0.2.0]") < new.index("- b") < new.index("[0.1.0]") < new.index("- a")
