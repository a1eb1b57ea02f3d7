"""Predicted bytes of a step beside measured ones, for ten model families.

    python packages/shard-spec/benchmarks/memory.py        writes docs/benchmarks/shard-spec-memory.md

The models and the measurement are those of ``tests/memory_families.py``; the suite asserts the same figures.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE.parents[1] / "docs" / "benchmarks" / "shard-spec-memory.md"
sys.path.insert(0, str(PACKAGE / "tests"))

from memory_families import FAMILIES, PARTS, measured, predicted  # noqa: E402  # the tests are not installed

HEAD = f"""# shard-spec: predicted and measured bytes of a step

Made by `python packages/shard-spec/benchmarks/memory.py` on {date.today()}, torch {torch.__version__}, CPU.
Small models of {len(FAMILIES)} families of transformers, float32, one process:
`plan.memory(model, optimizer="adamw")` and `plan.activations(model, batch).local_bytes`, which run shapes only,
beside a real forward, backward and step of AdamW. Activations are what autograd keeps after forward,
each memory once, parameters and buffers left out; attention without dropout counts as a fused kernel.

| family | parameters | gradients | AdamW state | activations predicted | measured | error |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    lines = []
    for family in FAMILIES:
        expected, real = predicted(family), measured(family)
        exact = [
            "equal" if expected[part] == real[part] else f"{expected[part] - real[part]:+,} B" for part in PARTS[:3]
        ]
        own = expected["activations"], real["activations"]
        error = f"{(own[0] / own[1] - 1) * 100:+.2f} %"
        lines.append(f"| {' | '.join([family.name, *exact, *(f'{each:,} B' for each in own), error])} |")
        print(lines[-1])
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
