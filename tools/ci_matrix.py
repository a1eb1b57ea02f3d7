"""Turn `nox --list --json` into a GitHub Actions matrix: every session that a CPU runner can do.

python tools/ci_matrix.py sessions.json >> "$GITHUB_OUTPUT"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
LATEST_ONLY = ("lint", "types", "build", "demo", "docs", "vllm")  # what does not depend on the interpreter runs once
ELSEWHERE = ("integration_gpu", "release", "versions", "bench")  # a GPU runner, a person, a big disk, a quiet machine


def matrix(sessions: list[dict[str, object]]) -> dict[str, list[dict[str, str]]]:
    rows = []
    for entry in sessions:
        name, group = str(entry["session"]), str(entry["name"])
        if group in ELSEWHERE:
            continue
        pythons = PYTHONS[:1] if group in LATEST_ONLY else PYTHONS
        rows += [{"session": name, "python": python} for python in pythons]
    if not rows:
        raise SystemExit("ci_matrix: nox listed no sessions")
    return {"include": rows}


if __name__ == "__main__":
    print("matrix=" + json.dumps(matrix(json.loads(Path(sys.argv[1]).read_text()))))
