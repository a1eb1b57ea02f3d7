"""What `import PACKAGE` costs beyond torch, and whether `COMMAND --help` imports torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import repo

BASE = "import torch, torch.distributed.tensor"
ROUNDS = 3
TARGET = 0.3  # seconds
HELP = """
import sys
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name={name!r})
try:
    command.load()(["--help"])
except SystemExit:
    pass
print("torch" in sys.modules)
"""


def seconds(first: str, then: str) -> float:
    """Time of `then` in a fresh process after `first`."""
    code = f"import time\n{first}\nbegin = time.perf_counter()\n{then}\nprint(time.perf_counter() - begin)"
    return float(_output(code))


def _output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


def rows() -> list[dict[str, str]]:
    found = []
    for package in repo.packages().values():
        own, floor = [], []
        for _ in range(ROUNDS):  # by turns, so that what else the machine does meets both
            floor.append(seconds("", BASE))
            own.append(seconds(BASE, f"import {package.module} as p; [getattr(p, name) for name in p.__all__]"))
        found.append(
            {
                "what": f"`import {package.module}` and every public name",
                "target": f"under {TARGET:g} s beyond torch",
                "measured": f"median {median(own) * 1e3:.0f} ms, least {min(own) * 1e3:.0f} ms",
                "peer": f"`{BASE}`: median {median(floor):.2f} s, least {min(floor):.2f} s",
            }
        )
        if "[project.scripts]" in (package.path / "pyproject.toml").read_text():
            begin = [seconds("", HELP.format(name=package.dist)) for _ in range(ROUNDS)]
            imports = _output(HELP.format(name=package.dist))
            found.append(
                {
                    "what": f"`{package.dist} --help`",
                    "target": "without importing torch",
                    "measured": f"torch imported: {imports}; median {median(begin) * 1e3:.0f} ms",
                    "peer": f"`import torch` alone: {seconds('', 'import torch'):.2f} s",
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {"title": "Imports", "command": "python tools/bench_imports.py", "rows": rows()}
    for row in result["rows"]:
        print("  ".join(map(str, row.values())))  # type: ignore[attr-defined]
    if options.json:
        options.json.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
