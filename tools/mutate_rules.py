"""Make every row of dp-partition's rule table wrong, in every way that changes a plan; `verify` has to find it.

    python tools/mutate_rules.py                       all rows; about four minutes on one core
    python tools/mutate_rules.py mm addmm              some rows
    python tools/mutate_rules.py --page FILE           write the table too

Rows are operators as the table names them, and the elementwise operators that its families cover. The mutations and the
probes they are tried on are in packages/dp-partition/tests/rule_probes.py. A mutation is tried in a process of its
own: kernels do not check everything, and some end the process when they are handed shapes that do not fit. Exit 0:
every mutation was killed and every row is used by a probe. Exit 1: one survived.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mutations
from mutations import Outcome

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
    """Try the mutations of every row, and print what became of them."""
    import rule_mutations as mutating
    import rule_probes as probing
    import torch
    from dp_partition.sharding.op_rules.table import RULES
    from dp_partition.testing.verification import verify_capture

    torch.set_num_threads(1)
    rows_of = {name: probing.probe(name).rows() for name in probing.all_probes()}
    rows = sorted(set(RULES) | set().union(*rows_of.values()))

    def prepare(chosen: list[str]) -> str:
        for name in rows_of:  # what is right must be found right before what is wrong is worth anything
            one = probing.probe(name)
            verify_capture(one.step, one.capture, one.plan, one.values)
        return ", ".join(row for row in chosen if not mutating.using(rows_of, row) and row not in NEEDS_CUDA)

    def attempt(row: str) -> list[Outcome]:
        probes = mutating.using(rows_of, row)
        changes = [*mutating.CHANGES, mutating.CARELESS]
        attempts = {change: partial(mutating.try_mutation, row, change, probes) for change in changes}
        target = mutating.shape_argument_of(row)
        if target is not None:
            attempts["shape argument left global"] = partial(mutating.try_shape_argument, target, probes)
        tried = {change: in_child(each) for change, each in attempts.items()}
        return [Outcome(change, each["result"], each["how"]) for change, each in tried.items() if each["result"]]

    def page(outcomes: dict[str, list[Outcome]]) -> list[str]:
        every = [each for tried in outcomes.values() for each in tried]
        killed = sum(each.result == "killed" for each in every)
        text = [
            "# dp-partition: mutations of the rule table",
            "",
            "Made by `python tools/mutate_rules.py --page docs/benchmarks/dp-partition-rules.md`. Each row is",
            "falsified in every way that changes the plan of a probe (the output on another dim, a reduction missing",
            "or exchanged, an input replicated, a shape argument left global, any shard accepted); `verify` has to",
            "refuse it. The last column is the error of the first mutation, with its node.",
            "",
            f"**{len(outcomes)} rows, {len(every)} mutations: {killed} killed, {len(every) - killed} survived.**",
            "",
            "| row | probes | mutations | killed | found as |",
            "|---|---|---|---|---|",
        ]
        for row, tried in outcomes.items():
            alive = [each.mutation for each in tried if each.result != "killed"]
            survivors = f" (alive: {', '.join(alive)})" if alive else ""
            how = tried[0].how if tried else NEEDS_CUDA.get(row, "no mutation changes a plan")
            probes = len(mutating.using(rows_of, row))
            text.append(f"| `{row}` | {probes} | {len(tried)} | {len(tried) - len(alive)}{survivors} | {how} |")
        return text

    return mutations.main(__doc__, rows, attempt, page, prepare)


if __name__ == "__main__":
    sys.exit(main())
