"""Clones of this repository, in which tests try releases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import repo


class Clone:
    """A clone of a repository, with a committer.

    Attributes:
        path: Its folder.
    """

    def __init__(self, folder: Path, of: Path = repo.ROOT) -> None:
        self.path = folder / "clone"
        repo.git("clone", "--quiet", "--no-hardlinks", str(of), str(self.path))
        self.git("config", "user.name", "release")
        self.git("config", "user.email", "release@example.org")

    def git(self, *arguments: str) -> str:
        return repo.git(*arguments, cwd=self.path)

    def python(self, *arguments: str, status: int = 0) -> str:
        """Run this interpreter in the clone, which must end with `status`; returns what it printed."""
        outer = ("NOX", "VIRTUAL_ENV", "UV_PYTHON")  # of the session that runs this
        variables = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
        command = [sys.executable, *arguments]
        completed = subprocess.run(command, cwd=self.path, env=variables, capture_output=True, text=True, check=False)
        assert completed.returncode == status, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    def release(self, name: str, segment: str, day: str = "2026-12-01") -> str:
        """Run `release.py`, commit and tag as it says; returns what it printed."""
        printed = self.python("tools/release.py", name, segment, "--date", day)
        tag = f"{name}-v{repo.read_package(self.path / 'packages' / name).version}"
        self.git("commit", "--quiet", "--all", "--message", f"Release {tag}")
        self.git("tag", tag)
        return printed
