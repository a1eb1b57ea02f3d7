#!/usr/bin/env python3
"""Run this repository's sessions with nothing but CPython >= 3.11 and pip.

    python3 tools/dev.py                 the tests: nox's default sessions
    python3 tools/dev.py demo            the main job, on four ranks
    python3 tools/dev.py SESSION [...]   other sessions ("tests(shard-spec)", bench, ...); what follows `--` is theirs
    python3 tools/dev.py --list          every session

A pinned nox is put into `.dev/`, once, and called from there. Where nox is installed already, `nox` and `nox -s demo`
do the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / ".dev"
PINS = ("nox[uv]==2026.10.20", "uv==0.13.8")
# nox is found by the path of this process alone: PYTHONPATH would put its requirements into the sessions, too.
NOX = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'nox'; from nox.__main__ import main; main()"


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  # an older interpreter meets this file first
        print(f"dev.py: CPython 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    install_nox()
    # Leading words are sessions; the first option and what follows it are nox's own.
    count = next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))
    arguments = [*(["-s", *argv[:count]] if count else []), *argv[count:]]
    variables = os.environ | {"PATH": os.pathsep.join([str(LIBRARY / "bin"), os.environ["PATH"]])}  # uv
    return subprocess.call([sys.executable, "-c", NOX, str(LIBRARY), *arguments], cwd=ROOT, env=variables)


def install_nox() -> None:
    """Install the pinned nox with pip, unless this interpreter did so before; Debian lacks what venv needs."""
    stamp = LIBRARY / "pins.txt"
    pins = "\n".join((sys.version, *PINS))
    if stamp.exists() and stamp.read_text() == pins:
        return
    # stderr, since `--list --json` writes to stdout.
    print(f"dev.py: making {LIBRARY.relative_to(ROOT)}/ with {', '.join(PINS)} ...", file=sys.stderr)
    shutil.rmtree(LIBRARY, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(LIBRARY)]
    if subprocess.call([*pip, *PINS]) != 0:
        shutil.rmtree(LIBRARY, ignore_errors=True)
        raise SystemExit("dev.py: pip could not install " + ", ".join(PINS))
    stamp.write_text(pins)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
