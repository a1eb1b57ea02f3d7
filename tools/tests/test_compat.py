"""`nox -s compat` in a clone with release tags: a release that breaks a released dependent is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scratch import Clone

RELEASED_TEST = """
from shard_reshard import plan_reshard
from shard_spec import Layout, MeshSpec


def test_a_plan_that_users_of_the_release_make() -> None:
    mesh = MeshSpec({"tp": 2})
    plan = plan_reshard((4, 4), "float32", Layout(mesh, "S(0)"), Layout(mesh, "S(1)"))
    assert plan.world_size == 2
"""


@pytest.fixture(scope="module")
def released(committed: Clone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clone in which shard-spec and shard-reshard 0.1.0 were released; the latter's tests are one."""
    folder: Path = tmp_path_factory.mktemp("compat")
    clone = Clone(folder, of=committed.path)
    tests = clone.path / "packages" / "shard-reshard" / "tests"
    shutil.rmtree(tests)
    tests.mkdir()
    (tests / "test_released.py").write_text(RELEASED_TEST)
    clone.git("add", "--all")
    for name in ("shard-spec", "shard-reshard"):
        clone.release(name, "0.1.0")
    (clone.path / "packages" / "shard-spec" / "changes").mkdir(exist_ok=True)
    (clone.path / "packages" / "shard-spec" / "changes" / "+box.removed.md").write_text("`Box`.\n")
    yield clone
    shutil.rmtree(folder)


def compat(clone: Clone, *, status: int, reuse: bool = False) -> str:
    options = ["--reuse-existing-virtualenvs"] if reuse else []
    return clone.python("-m", "nox", *options, "-s", "compat", "--", "shard-spec", status=status)


def test_compat_passes_a_good_release_and_refuses_one_that_breaks_a_dependent(released: Clone) -> None:
    released.python("tools/release.py", "shard-spec", "patch", "--date", "2026-12-02")
    assert "1 passed" in compat(released, status=0)

    # The break: a public name that the released shard-reshard imports is gone.
    init = released.path / "packages" / "shard-spec" / "src" / "shard_spec" / "__init__.py"
    before = init.read_text()
    init.write_text("\n".join(line for line in before.splitlines() if "Box" not in line) + "\n")
    assert init.read_text() != before
    printed = compat(released, status=1, reuse=True)
    assert "Box" in printed
    assert "shard-reshard-v0.1.0" in printed or "test_released.py" in printed


def test_a_version_that_no_released_dependent_takes_breaks_none(released: Clone) -> None:
    about = released.path / "packages" / "shard-spec" / "src" / "shard_spec" / "__about__.py"
    about.write_text('__version__ = "0.2.0"\n')
    printed = compat(released, status=0, reuse=True)
    assert "shard-reshard-v0.1.0 does not admit shard-spec 0.2.0" in printed
    assert "nothing that it could break" in printed
