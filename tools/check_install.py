"""Run every command of `docs/install.md`, each block in an empty environment of its own.

    python tools/check_install.py        (nox -s install)

A block is a `sh` block, run by the pip that CPython brings; `$REPO` in it is this checkout's git folder, so that what
is committed is installed, and `dist` is a folder with wheels of the working tree. torch is installed first, as the page
asks. Afterwards `check_isolation.py` imports the packages that the block names, and their requirements are met.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import repo

PAGE = repo.ROOT / "docs" / "install.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
TORCH = re.search(r'"(torch==[\d.]+)"', (repo.ROOT / "pyproject.toml").read_text())


def blocks() -> list[list[str]]:
    """The pip commands of each block; a line that ends in a backslash goes on in the next."""
    pages = [code.replace("\\\n", " ").splitlines() for code in BLOCK.findall(PAGE.read_text())]
    commands = [[line for line in lines if line.startswith("pip install ")] for lines in pages]
    return [lines for lines in commands if lines and not any("install torch" in line for line in lines)]


def named(commands: list[str]) -> list[str]:
    """The packages that the commands name, and those that they need."""
    text = " ".join(commands)
    if "./packages/*" in text:
        return list(repo.packages())
    return repo.closure(*(name for name in repo.packages() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)))


def check(commands: list[str], folder: Path, dist: Path) -> str:
    """Run a block's commands in an empty environment; returns what the imports printed."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    has_pip = importlib.util.find_spec("ensurepip")  # Debian's CPython comes without
    _run(
        [sys.executable, "-m", "venv"] if has_pip else ["uv", "venv", "--seed", "--python", sys.executable], str(folder)
    )
    assert TORCH is not None, "the root's pyproject.toml pins no torch"
    _run(["uv", "pip", "install", "--python", str(python)], TORCH[1], "numpy")
    pip = [str(python), "-m", "pip"]
    for command in commands:
        text = command.replace("$REPO", repo.ROOT.as_uri()).replace("--find-links dist", f"--find-links {dist}")
        _run(pip, *(part for word in shlex.split(text.removeprefix("pip ")) for part in _glob(word)))
    _run(pip, "check")
    return _run([str(python), str(repo.ROOT / "tools" / "check_isolation.py")], *named(commands))


def _glob(word: str) -> list[str]:
    return [f"./{p.relative_to(repo.ROOT)}" for p in sorted(repo.ROOT.glob(word[2:]))] if "*" in word else [word]


def _run(command: list[str], *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    call = [*command, *arguments]
    completed = subprocess.run(call, cwd=repo.ROOT, env=variables, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"install: {shlex.join(call)}\n{completed.stdout}{completed.stderr}")
    return completed.stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory() as dist:
        for package in repo.packages().values():
            _run(["uv", "build", "--quiet", "--wheel", "--out-dir", dist], str(package.path))
        for commands in blocks():
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                outcome = check(commands, Path(folder), Path(dist))
            print(f"{time.monotonic() - began:5.1f} s  {commands[0][:100]}\n{outcome}", flush=True)
    print(f"install: {len(blocks())} blocks of {PAGE.relative_to(repo.ROOT)}, each in an empty environment")
    return 0 if blocks() else 1


if __name__ == "__main__":
    sys.exit(main())
