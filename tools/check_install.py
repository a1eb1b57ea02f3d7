"""Run every command of `docs/install.md`, each block in an empty environment of its own.

    python tools/check_install.py        (nox -s install)

A block is a `sh` block, run by the pip that CPython brings; `$REPO` in it is this checkout's git folder, so that what
is committed is installed, and `dist` is a folder with wheels of the working tree. torch is installed first, as the page
asks. Afterwards the packages that the block names import, with every module, no other package of this repository does,
and their requirements are met.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import repo
import wheelhouse

PAGE = repo.ROOT / "docs" / "install.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
IMPORTS = """
import importlib, importlib.metadata, importlib.util, pkgutil, sys
wanted, others = sys.argv[1].split(","), [name for name in sys.argv[2].split(",") if name]
for name in wanted:
    shared = importlib.import_module(f"{name}._shared")
    modules = [module.name for module in pkgutil.iter_modules(shared.__path__, f"{name}._shared.")]
    assert len(modules) > 2, f"{name}: {modules}"
    for module in modules:
        importlib.import_module(module)
present = [name for name in others if importlib.util.find_spec(name)]
assert not present, f"{present} came along"
print("imported", *(f"{name} {importlib.metadata.version(name.replace('_', '-'))}" for name in wanted))
"""


def blocks() -> list[list[str]]:
    """The pip commands of each block; a line that ends in a backslash goes on in the next."""
    found = []
    for code in BLOCK.findall(PAGE.read_text()):
        lines = [line for line in code.replace("\\\n", " ").splitlines() if line.startswith("pip install ")]
        if lines and not any("install torch" in line for line in lines):
            found.append(lines)
    return found


def named(commands: list[str]) -> list[str]:
    """The packages that the commands name, and those that they need."""
    text = " ".join(commands)
    if "./packages/*" in text:
        return list(repo.packages())
    direct = [name for name in repo.packages() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
    extras = [name for name in repo.packages() if f"[{name}]" in text]
    return [name for name in repo.packages() if any(name in repo.closure(n) for n in [*direct, *extras])]


class Environment:
    """An empty virtual environment with CPython's pip, or uv's where there is none."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.uv = shutil.which("uv")
        if importlib.util.find_spec("ensurepip") or not self.uv:
            _run([sys.executable, "-m", "venv", str(folder)])
        else:
            _run([self.uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)])

    def pip(self, *arguments: str, quick: bool = False) -> None:
        """Run pip; a quick one is uv's, if it is there."""
        if quick and self.uv:
            _run([self.uv, "pip", arguments[0], "--quiet", "--python", str(self.python), *arguments[1:]])
        else:
            _run([str(self.python), "-m", "pip", arguments[0], *arguments[1:]])


def check(commands: list[str], folder: Path, dist: Path) -> str:
    environment = Environment(folder / "environment")
    environment.pip("install", f"torch=={repo.TORCH}", "numpy", quick=True)
    for command in commands:
        text = command.replace("$REPO", repo.ROOT.as_uri()).replace("--find-links dist", f"--find-links {dist}")
        words = shlex.split(text.removeprefix("pip "))
        environment.pip(*(part for word in words for part in _glob(word)))
    environment.pip("check")
    modules = [repo.packages()[name].module for name in named(commands)]
    others = [package.module for package in repo.packages().values() if package.module not in modules]
    call = [str(environment.python), "-c", IMPORTS, ",".join(modules), ",".join(others)]
    return _run(call, cwd=folder)


def _glob(word: str) -> list[str]:
    return [f"./{p.relative_to(repo.ROOT)}" for p in sorted(repo.ROOT.glob(word[2:]))] if "*" in word else [word]


def _run(command: list[str], cwd: Path = repo.ROOT) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    completed = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"install: {shlex.join(command)}\n{completed.stdout}{completed.stderr}")
    return completed.stdout.strip()


def main() -> int:
    dist = wheelhouse.build_current(list(repo.packages()))
    found = blocks()
    for commands in found:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = check(commands, Path(folder), dist)
        print(f"{time.monotonic() - began:5.1f} s  {commands[0][:100]}\n         {outcome}", flush=True)
    print(f"install: {len(found)} blocks of {PAGE.relative_to(repo.ROOT)}, each in an empty environment")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
