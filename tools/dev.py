#!/usr/bin/env python3
"""Run this repository's sessions on a machine that has nothing but CPython >= 3.11 and pip.

    python3 tools/dev.py                 the tests: nox's default sessions
    python3 tools/dev.py demo            the main job, on four ranks
    python3 tools/dev.py SESSION [...]   other sessions ("tests(shard-spec)", bench, ...); what follows `--` is theirs
    python3 tools/dev.py --list          every session

It makes a private environment in `.dev/` that holds a pinned nox, once, and hands over to it. Where nox is installed
already, `nox` and `nox -s demo` do the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".dev"
PINS = ("nox[uv]==2026.10.20", "uv==0.13.8")


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  # this file is what an older interpreter meets first
        print(f"dev.py: CPython 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command, variables = nox_command()
    return subprocess.call([*command, *nox_arguments(argv)], cwd=ROOT, env=variables)


def nox_arguments(argv: list[str]) -> list[str]:
    """Leading words are sessions; the first option and what follows it are nox's own."""
    names = []
    for word in argv:
        if word.startswith("-"):
            break
        names.append(word)
    return [*(["-s", *names] if names else []), *argv[len(names) :]]


def nox_command() -> tuple[list[str], dict[str, str]]:
    """How to call nox from the private environment, which is made first where it is missing or pinned otherwise."""
    stamp = ENVIRONMENT / "pins.txt"
    wanted = "\n".join((sys.version, *PINS))
    if not stamp.exists() or stamp.read_text() != wanted:
        # Not to stdout, where `--list --json` writes.
        print(f"dev.py: making {ENVIRONMENT.relative_to(ROOT)}/ with {', '.join(PINS)} ...", file=sys.stderr)
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        make_environment()
        stamp.write_text(wanted)
    variables = dict(os.environ)
    library = ENVIRONMENT / "lib-target"
    if library.exists():  # no venv module here: the packages lie in one folder
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(library), os.environ.get("PYTHONPATH")]))
        variables["PATH"] = os.pathsep.join([str(library / "bin"), os.environ["PATH"]])
        return [sys.executable, "-m", "nox"], variables
    binaries = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")
    variables["PATH"] = os.pathsep.join([str(binaries), os.environ["PATH"]])
    return [str(binaries / "python"), "-m", "nox"], variables


def make_environment() -> None:
    made = subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], capture_output=True, text=True)
    if made.returncode == 0:
        python, target = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python", []
    else:  # Debian and others ship CPython without ensurepip; pip alone is enough
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        ENVIRONMENT.mkdir()
        python, target = Path(sys.executable), ["--target", str(ENVIRONMENT / "lib-target")]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *target, *PINS]
    if subprocess.call(install) != 0:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        raise SystemExit("dev.py: pip could not install " + ", ".join(PINS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
