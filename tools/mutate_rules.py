"""Make every row of dp-partition's rule table wrong, in every way that changes a plan; `verify` has to find it.

    python tools/mutate_rules.py                       all rows; about four minutes on one core
    python tools/mutate_rules.py mm addmm              some rows
    python tools/mutate_rules.py --markdown FILE       write the table too

Rows are operators as the table names them, and the elementwise operators that its families cover. The mutations and the
probes they are tried on are in packages/dp-partition/tests/rule_probes.py. A mutation is tried in a process of its
own: kernels do not check everything, and some end the process when they are handed shapes that do not fit. Exit 0:
every mutation was killed and every row is used by a probe. Exit 1: one survived.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages" / "dp-partition" / "tests"))

NEEDS_CUDA = {"_scaled_dot_product_efficient_attention": "CUDA only"}


def in_child(attempt: Callable[[], Any]) -> dict[str, str]:
    """The outcome of an attempt made in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the allocator says before it gives up
            os.write(writing, json.dumps(vars(attempt())).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return dict(json.loads(text))
    how = f"the kernel ends the process (signal {os.WTERMSIG(status)})" if os.WIFSIGNALED(status) else "child failed"
    return {"result": "killed" if os.WIFSIGNALED(status) else "survived", "probe": "", "how": how}


def main() -> int:
    """Try the mutations and print what became of each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()

    import rule_mutations as mutations
    import rule_probes as probing
    import torch
    from dp_partition.sharding.op_rules.table import RULES
    from dp_partition.testing.verification import verify_capture

    torch.set_num_threads(1)
    rows_of = {name: probing.probe(name).rows() for name in probing.all_probes()}
    for name in rows_of:  # what is right must be found right before what is wrong is worth anything
        one = probing.probe(name)
        verify_capture(one.step, one.capture, one.plan, one.values)
    rows = sorted(set(RULES) | set().union(*rows_of.values()))
    unknown = set(options.rows) - set(rows)
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}")
    lines, survived, total = [], 0, 0
    for row in options.rows or rows:
        probes = mutations.using(rows_of, row)
        tried = []
        for change in [*mutations.CHANGES, mutations.CARELESS]:
            outcome = in_child(partial(mutations.try_mutation, row, change, probes))
            tried.append((change, outcome))
        target = mutations.shape_argument_of(row)
        if target is not None:
            outcome = in_child(partial(mutations.try_shape_argument, target, probes))
            tried.append(("shape argument left global", outcome))
        tried = [(change, outcome) for change, outcome in tried if outcome["result"]]
        alive = [change for change, outcome in tried if outcome["result"] == "survived"]
        survived += len(alive)
        total += len(tried)
        lines.append((row, len(probes), tried, alive))
        state = (
            "unused: " + NEEDS_CUDA.get(row, "no probe") if not probes else f"{len(tried) - len(alive)}/{len(tried)}"
        )
        print(f"{row:45} {state}  {', '.join(alive)}", flush=True)
    unused = [row for row, probes, _, _ in lines if not probes and row not in NEEDS_CUDA]
    untouched = [row for row, probes, tried, _ in lines if probes and not tried]
    print(f"{len(lines)} rows, {total} mutations, {total - survived} killed, {survived} survived")
    print(f"rows no mutation of which changes a plan: {', '.join(untouched) or 'none'}")
    if options.markdown:
        options.markdown.write_text(markdown(lines, total, survived, untouched))
    return 1 if survived or unused else 0


def markdown(lines: list[Any], total: int, survived: int, untouched: list[str]) -> str:
    """The result as a page."""
    text = [
        "# dp-partition: every row of the rule table made wrong",
        "",
        "Made by `python tools/mutate_rules.py --markdown docs/benchmarks/dp-partition-rules.md`. Each row is",
        "made wrong in every way that changes the plan of a probe (the output on another dim, a reduction forgotten or",
        "exchanged, an input taken whole, a shape argument left global, any shard let through); `verify` has to refuse",
        "it. The last column says what found the first of the mutations, and at which node of the probe's graph.",
        "",
        f"**{len(lines)} rows, {total} mutations: {total - survived} killed, {survived} survived.**",
        "",
        "| row | probes | mutations | killed | found as |",
        "|---|---|---|---|---|",
    ]
    for row, probes, tried, alive in lines:
        how = tried[0][1]["how"] if tried else NEEDS_CUDA.get(row, "no mutation changes a plan")
        survivors = f" (alive: {', '.join(alive)})" if alive else ""
        text.append(f"| `{row}` | {probes} | {len(tried)} | {len(tried) - len(alive)}{survivors} | {how} |")
    text += [
        "",
        f"Rows of which no mutation changes a plan: {', '.join(f'`{row}`' for row in untouched) or 'none'}.",
        "",
    ]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
