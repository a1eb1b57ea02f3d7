"""The rows of the design's target table that are right or wrong rather than fast, and the long forms of the tests.

    python packages/shard-spec/benchmarks/checks.py                 all rows (a quarter of an hour)
    python packages/shard-spec/benchmarks/checks.py --only memory   one row, for a look; the page is not written

Runs the package's tests with ``SHARD_SPEC_ALL=1`` and writes
``docs/benchmarks/shard-spec-checks.md``. A row whose tests fail ends the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import date
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE.parents[1] / "docs" / "benchmarks" / "shard-spec-checks.md"


@dataclass(frozen=True)
class Check:
    """One row: what is claimed, and the tests that fail where it is not so."""

    key: str
    what: str
    target: str
    found: str
    peer: str
    tests: tuple[str, ...]
    counted: str = ""  # how the names of the tests begin whose number is ``{number}`` in ``found``


CHECKS = (
    Check(
        "layouts",
        "local shapes and offsets identical to DTensor's, random (shape, mesh, placements)",
        ">= 10,000",
        "10,500 cases on 2 ranks each: 21,000 equal; 1,500 with strided shards equal",
        "DTensor",
        ("test_layout_dtensor.py",),
    ),
    Check(
        "memory",
        "static memory of a plan against the live bytes of parameters, buffers, gradients and optimizer state",
        "byte for byte on 2-8 gloo ranks",
        "equal on every rank of 2, 4 and 8: three plans (uneven and empty shards too) x SGD, momentum, AdamW, "
        "and AdamW on float32 copies of bfloat16 parameters",
        "the storages themselves",
        ("apply/test_apply.py::test_live_bytes_are_those_of_plan_memory",),
    ),
    Check(
        "activations",
        "the estimate of activations against what autograd keeps (it is labelled an estimate)",
        "error stated",
        "ten families of transformers: at most 0.05 % apart; tensor-parallel over 2 ranks: within 25 %",
        "`saved_tensors_hooks` in a real forward",
        ("test_plan_activations.py",),
    ),
    Check(
        "faults",
        "seeded faults: alone, five at once, all at once; the module is bit for bit as before",
        ">= 40 kinds in one pass",
        "{number} kinds, all reported",
        "torch `shard_module`: the first only, module half sharded",
        ("test_plan_faults.py", "legacy/test_plan_module.py"),
        "test_each_fault_is_reported",
    ),
    Check(
        "fused",
        "fused QKV: sharded, saved with DCP without a gather, loaded at another tp size",
        "equal",
        "equal",
        "torch: open since 2024 (issue 140069)",
        ("test_convert.py::test_fused_and_uneven_weights_save_without_gathering_and_load_at_other_sizes",),
    ),
    Check(
        "families",
        "MegatronPlanner on transformers families with their default sizes; small ones are executed slice by slice",
        ">= 12 families, >= 95 % of matmul-weight bytes sharded",
        "{number} model families, each >= 95 %, what is left is listed in the test; 7 more in part, with the reason",
        "8 families: the tensor-parallel plan that transformers ships",
        ("test_planners_families.py",),
        "test_family",
    ),
)


def run(check: Check) -> tuple[str, str]:
    """Run the tests of one row; returns what was found, and how many passed and how long they took."""
    environment = {**os.environ, "SHARD_SPEC_ALL": "1", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.xml"
        tests = [f"tests/{test}" for test in check.tests]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", *tests]
        subprocess.run(command, cwd=PACKAGE, env=environment, check=True)
        suite = next(ET.parse(file).iter("testsuite"))
    if suite.attrib["skipped"] != "0":
        raise SystemExit(f"checks: {suite.attrib['skipped']} tests of {check.key} were skipped")
    number = sum(case.attrib["name"].startswith(check.counted) for case in suite.iter("testcase"))
    return check.found.format(number=number), f"{suite.attrib['tests']} tests, {time.perf_counter() - begin:.0f} s"


def page(results: dict[str, tuple[str, str]]) -> str:
    """The table."""
    import torch

    lines = [
        "# shard-spec: checks at full size",
        "",
        "Made by `python packages/shard-spec/benchmarks/checks.py` "
        f"on {date.today().isoformat()}, torch {torch.__version__}, CPU. Each row runs the tests it names; they fail "
        "if the claim is false. The package's suite runs the same "
        "tests on a sample.",
        "",
        "| what | target | found | compared with | run |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.what} | {c.target} | {results[c.key][0]} | {c.peer} | {results[c.key][1]} |"
        for c in CHECKS
        if c.key in results
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the rows, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[check.key for check in CHECKS], action="append")
    arguments = parser.parse_args()
    chosen = [check for check in CHECKS if not arguments.only or check.key in arguments.only]
    results: dict[str, tuple[str, str]] = {}
    for check in chosen:
        results[check.key] = run(check)
        print(f"{check.key}: {': '.join(results[check.key])}", flush=True)
    if len(chosen) == len(CHECKS):
        PAGE.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
