"""Try every parser of untrusted files on 10,000 inputs and more, and write what was found.

    python tools/fuzz.py                              all of them, 10,000 inputs each, into docs/benchmarks/fuzz.md
    python tools/fuzz.py --only plan-json --inputs 500     one, for a look; no page is written

The inputs are good files that hypothesis changes: values replaced by odd ones, dropped, doubled or buried, text cut off
or broken (see `packages/shard-spec/tests/strange_files.py`, `packages/shard-reshard/tests/broken_files.py`). An input
is read, or refused with one clear error. A crash, another exception, more than two seconds of CPU time, a file opened
that is none of the user's, an unpickled class or a started process ends the run, with the input made small. Each parser
has a process of its own. The packages' suites run a sample of the same.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import repo

PAGE = repo.ROOT / "docs" / "benchmarks" / "fuzz.md"
TESTS = {name: repo.ROOT / "packages" / name / "tests" for name in ("shard-spec", "shard-reshard")}
SHARD_SPEC = (
    "plan-json",
    "layout-text",
    "safetensors-header",
    "safetensors-index",
    "tp-plan",
    "command-line",
    "hugging-face-config",
)
RESHARD_HEADER = "shard-reshard-safetensors"
RESHARD_PLAN = "shard-reshard-plan"
NAMES = (*SHARD_SPEC, RESHARD_HEADER, RESHARD_PLAN)


def try_one(name: str, count: int) -> dict[str, Any]:
    """Run one parser here; returns what a row of the page says."""
    from hypothesis import HealthCheck, Phase, given, settings

    warnings.simplefilter("ignore")  # what transformers says about fields it does not like
    with tempfile.TemporaryDirectory() as folder:
        what, strategy, check = parser_of(name, Path(folder))
        read, slowest, wall = [0, 0], 0.0, time.perf_counter()

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(drawn: Any) -> None:
            nonlocal slowest
            begin = time.process_time()
            read[bool(check(drawn))] += 1
            slowest = max(slowest, time.process_time() - begin)

        run()
    assert all(read), "inputs that are all read, or all refused, show little"
    assert sum(read) >= count
    return {
        "name": name,
        "what": what,
        "read": read[True],
        "refused": read[False],
        "slowest": slowest,
        "wall": time.perf_counter() - wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def parser_of(name: str, folder: Path) -> tuple[str, Any, Callable[[Any], bool]]:
    """What it reads, how inputs are drawn, and what reads one."""
    if name == RESHARD_HEADER:
        sys.path.insert(0, str(TESTS["shard-reshard"]))
        broken = importlib.import_module("broken_files")
        what = "shard-reshard: safetensors files; accepted ones equal what the format's own library reads"
        return what, broken.broken_files(), lambda data: broken.check_one(data, folder / "f")
    sys.path.insert(0, str(TESTS["shard-spec"]))
    from hypothesis import strategies as st

    strange = importlib.import_module("strange_files")
    if name == RESHARD_PLAN:
        return _reshard_plans(strange, folder)
    parser = strange.PARSERS[name]
    strange.warm_up(parser, folder)
    check = parser.check
    return f"shard-spec: {parser.what}", st.randoms(use_true_random=False).map(parser.make), lambda d: check(d, folder)


def _reshard_plans(strange: Any, folder: Path) -> tuple[str, Any, Callable[[Any], bool]]:
    sys.path.insert(0, str(TESTS["shard-reshard"]))
    from hypothesis import strategies as st

    broken = importlib.import_module("broken_plans")
    good = broken.plans()

    def make(rng: Any) -> str:
        text = rng.choice(good)
        if rng.random() < 0.5:
            return str(broken.broken(text, rng))
        return str(strange.files(json.loads(text), rng, json.dumps))

    def check(text: str) -> bool:
        with strange.bounded(text, folder):
            return bool(broken.check_one(text))

    for text in good:
        assert broken.check_one(text)  # imports what explains a plan
    what = "shard-reshard: plans as JSON; accepted ones round-trip, and their parts are computed"
    return what, st.randoms(use_true_random=False).map(make), check


def page(rows: list[dict[str, Any]], count: int) -> str:
    import hypothesis
    import torch

    head = f"""# Untrusted input: fuzzing every parser

Made by `python tools/fuzz.py` on {date.today().isoformat()}, {count:,} inputs for each parser; torch
{torch.__version__}, hypothesis {hypothesis.__version__}. What is trusted, and what is not:
[security](../design/security.md).

Each input is a valid file with one or several changes: values replaced (huge numbers, NaN, lone surrogates, paths out
of the folder, patterns that backtrack), removed, duplicated or nested; truncated text, duplicate keys, thousands of
brackets, other encodings. The parser must read it, or refuse it with one clear error, within two seconds of CPU time.
An audit hook checks that it opens no file outside the user's folder, unpickles no class and starts no process. No input
broke these rules.

| parser | read | refused | slowest input | memory of the process | the whole run |
|---|---|---|---|---|---|
"""
    lines = [
        f"| {r['what']} | {r['read']:,} | {r['refused']:,} | {r['slowest']:.2f} s | {r['peak']:.0f} MB "
        f"| {r['wall']:.0f} s |"
        for r in rows
    ]
    return head + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N")
    parser.add_argument("--json", type=Path, help="with --only: write the row here, in this process")
    arguments = parser.parse_args()
    if arguments.json:
        (name,) = arguments.only
        arguments.json.write_text(json.dumps(try_one(name, arguments.inputs)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or NAMES:
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, "--only", name, "--inputs", str(arguments.inputs), "--json", str(file)]
            subprocess.run(command, check=True)
            rows.append(json.loads(file.read_text()))
            print(" | ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not arguments.only:
        PAGE.write_text(page(rows, arguments.inputs))
        print(f"fuzz: wrote {PAGE.relative_to(repo.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
