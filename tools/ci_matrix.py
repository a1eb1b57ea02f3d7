"""Turn nox's list of sessions into a GitHub Actions matrix for CPU runners.

python3 tools/dev.py --list --json -k "not nothing" > sessions.json
python3 tools/ci_matrix.py sessions.json >> "$GITHUB_OUTPUT"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
# What does not depend on the interpreter runs once: checks, documents, and the hosts that others maintain.
LATEST_ONLY = (
    "lint", "types", "build", "demo", "drawn", "measured", "docs", "install", "pins", "multi_node",
    "accelerate", "jax", "peft", "ray", "slurm", "spmd_types", "transformers", "vllm",
)  # fmt: skip
# A GPU runner, a person, a big disk, a quiet machine; release tags; `isolation` runs the packages' tests on wheels.
ELSEWHERE = ("integration_gpu", "release", "versions", "bench", "oldest", "compat")


def matrix(sessions: list[dict[str, object]]) -> dict[str, list[dict[str, str]]]:
    rows = []
    for entry in sessions:
        name, group = str(entry["session"]), str(entry["name"])
        if group in ELSEWHERE or (group == "tests" and name != "tests(tools)"):
            continue
        pythons = PYTHONS[:1] if group in LATEST_ONLY else PYTHONS
        rows += [{"session": name, "python": python} for python in pythons]
    if not rows:
        raise SystemExit("ci_matrix: nox listed no sessions")
    return {"include": rows}


if __name__ == "__main__":
    print("matrix=" + json.dumps(matrix(json.loads(Path(sys.argv[1]).read_text()))))
