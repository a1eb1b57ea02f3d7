"""`nox -s compat`, in a scratch clone with release tags: a release that breaks a released dependent is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASED_TEST = """
from shard_reshard import plan_reshard
from shard_spec import Layout, MeshSpec


def test_a_plan_that_users_of_the_release_make() -> None:
    mesh = MeshSpec({"tp": 2})
    plan = plan_reshard((4, 4), "float32", Layout(mesh, "S(0)"), Layout(mesh, "S(1)"))
    assert plan.world_size == 2
"""


def run(*command: str, cwd: Path, status: int = 0) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NOX", "VIRTUAL_ENV", "UV_PYTHON"))}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which shard-spec and shard-reshard 0.1.0 were released; the latter's tests are one."""
    folder = tmp_path_factory.mktemp("compat")
    target = folder / "clone"
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target), cwd=folder)
    shutil.copy(ROOT / "noxfile.py", target)
    for tool in (ROOT / "tools").glob("*.py"):
        shutil.copy(tool, target / "tools")
    run("git", "config", "user.email", "release@example.org", cwd=target)
    run("git", "config", "user.name", "release", cwd=target)
    tests = target / "packages" / "shard-reshard" / "tests"
    shutil.rmtree(tests)
    tests.mkdir()
    (tests / "test_released.py").write_text(RELEASED_TEST)
    for name in ("shard-spec", "shard-reshard"):
        run(sys.executable, "tools/release.py", name, "0.1.0", "--date", "2026-12-01", cwd=target)
    run("git", "add", "-A", cwd=target)
    run("git", "commit", "-qm", "Release shard-spec-v0.1.0, shard-reshard-v0.1.0", cwd=target)
    for name in ("shard-spec", "shard-reshard"):
        run("git", "tag", f"{name}-v0.1.0", cwd=target)
    changelog = target / "packages" / "shard-spec" / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(text.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Removed\n\n- `Box`.\n", 1))
    yield target
    shutil.rmtree(folder)


def compat(clone: Path, *, status: int, reuse: bool = False) -> str:
    options = ["--reuse-existing-virtualenvs"] if reuse else []
    return run(sys.executable, "-m", "nox", *options, "-s", "compat(shard-spec)", cwd=clone, status=status)


def test_compat_passes_a_good_release_and_refuses_one_that_breaks_a_dependent(clone: Path) -> None:
    run(sys.executable, "tools/release.py", "shard-spec", "patch", "--date", "2026-12-02", cwd=clone)
    assert "1 passed" in compat(clone, status=0)

    # The break: a public name that the released shard-reshard imports is gone.
    init = clone / "packages" / "shard-spec" / "src" / "shard_spec" / "__init__.py"
    kept = init.read_text()
    init.write_text("\n".join(line for line in kept.splitlines() if "Box" not in line) + "\n")
    assert init.read_text() != kept
    said = compat(clone, status=1, reuse=True)
    assert "Box" in said
    assert "shard-reshard-v0.1.0" in said or "test_released.py" in said


def test_a_version_that_no_released_dependent_takes_breaks_none(clone: Path) -> None:
    about = clone / "packages" / "shard-spec" / "src" / "shard_spec" / "__about__.py"
    about.write_text('__version__ = "0.2.0"\n')
    said = compat(clone, status=0, reuse=True)
    assert "shard-reshard-v0.1.0 asks for shard-spec" in said
    assert "nothing that it could break" in said
