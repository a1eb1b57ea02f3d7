"""Make a package wrong in many ways; something has to notice each. Exit 0: every mutation was killed.

    python tools/mutate.py bridge                guards of tp-ddp-bridge taken out one by one; a test must fail
    python tools/mutate.py rules                 each row of dp-partition's rules falsified; `verify` must refuse it
    python tools/mutate.py rules mm addmm        some rows, or some mutations by name
    python tools/mutate.py bridge --page FILE    write what became of them (docs/benchmarks/tp-ddp-bridge-mutations.md,
                                                 docs/benchmarks/dp-partition-rules.md)

What is right must pass first: the named tests, and `verify` of every probe. The mutations stand with the packages'
tests (`bridge_mutations.py`, `rule_mutations.py`). Sources are edited in a fresh copy of the package, which comes first
on the path. A rule is tried in a process of its own: kernels that are handed shapes that do not fit may end it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import repo

NEEDS_CUDA = {"_scaled_dot_product_efficient_attention": "CUDA only"}


@dataclass(frozen=True)
class Outcome:
    """The fate of one mutation.

    Attributes:
        mutation: Its name.
        result: ``killed``, ``survived``, or what is wrong with the mutation.
        how: What noticed it, in one line.
    """

    mutation: str
    result: str
    how: str = ""


class Bridge:
    """Mutations of tp-ddp-bridge's sources, each with the tests that must fail."""

    title = "tp-ddp-bridge: mutations"
    text = "Each row removes one guard of the package, in a copy, and runs the test that has to fail."

    def __init__(self, folder: Path) -> None:
        source = repo.packages()["tp-ddp-bridge"].path
        self.package = folder / "package"  # a copy: the package may be edited meanwhile
        shutil.copytree(source, self.package, ignore=shutil.ignore_patterns("__pycache__", ".*", "dist"))
        sys.path.insert(0, str(source / "tests"))
        import bridge_mutations

        self.mutations = {mutation.name: mutation for mutation in bridge_mutations.MUTATIONS}
        self.names = list(self.mutations)

    def wrong_without(self, chosen: list[str]) -> str:
        """Return what fails on the copy without a mutation."""
        code, output = self._run_tests(self.package / "src", *sorted({self.mutations[name].tests for name in chosen}))
        return output[-3000:] if code else ""

    def attempt(self, name: str) -> list[Outcome]:
        """Apply a mutation to a copy of the sources and run its tests."""
        mutation = self.mutations[name]
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(self.package / "src" / "tp_ddp_bridge", Path(folder) / "tp_ddp_bridge")
            file = Path(folder) / "tp_ddp_bridge" / mutation.file
            text = file.read_text()
            if text.count(mutation.old) != 1:
                return [Outcome(name, f"does not fit: {text.count(mutation.old)} places in {mutation.file}")]
            file.write_text(text.replace(mutation.old, mutation.new))
            code, output = self._run_tests(Path(folder), mutation.tests)
        result = {0: "survived", 1: "killed"}.get(code, f"pytest ended with {code}: {output[-300:]}")
        errors = re.findall(r"^\s*(?:E\s+)?((?:[\w.]+Error|Failed|[\w.]+Exception)\b.*)$", output, re.MULTILINE)
        errors = errors or re.findall(r"^\s*E\s+(.+)$", output, re.MULTILINE) or ["the test failed"]
        return [Outcome(name, result, f"{mutation.tests}: {errors[0].strip()[:110]}" if code == 1 else "")]

    def _run_tests(self, source: Path, *tests: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, cwd=self.package, env=variables, capture_output=True, text=True, check=False)
        return process.returncode, process.stdout


class Rules:
    """Falsified rows of dp-partition's rule table."""

    title = "dp-partition: mutations of the rule table"
    text = (
        "Each row is falsified in every way that changes the plan of a probe (the output on another dim, a\n"
        "reduction missing or exchanged, an input replicated, a shape argument left global, any shard accepted);\n"
        "`verify` has to refuse it."
    )

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(repo.packages()["dp-partition"].path / "tests"))
        import rule_mutations
        import rule_probes
        import torch
        from dp_partition.sharding.rule_table import RULES

        torch.set_num_threads(1)
        self.mutating, self.probing = rule_mutations, rule_probes
        self.rows_of = {name: rule_probes.probe(name).rows() for name in rule_probes.all_probes()}
        self.names = sorted(set(RULES) | set().union(*self.rows_of.values()))

    def wrong_without(self, chosen: list[str]) -> str:
        """Rows that no probe uses; raises where `verify` refuses what is right."""
        for name in self.rows_of:
            probe = self.probing.probe(name)
            self.mutating.verify_capture(probe.step, probe.capture, probe.plan, probe.values)
        unused = [row for row in chosen if not self.mutating.using(self.rows_of, row)]
        return ", ".join(row for row in unused if row not in NEEDS_CUDA)

    def attempt(self, name: str) -> list[Outcome]:
        """Try all mutations of a row, each in a child."""
        probes = self.mutating.using(self.rows_of, name)
        changes = [*self.mutating.CHANGES, self.mutating.CARELESS]
        attempts = {change: partial(self.mutating.try_mutation, name, change, probes) for change in changes}
        target = self.mutating.shape_argument_of(name)
        if target is not None:
            attempts["shape argument left global"] = partial(self.mutating.try_shape_argument, target, probes)
        tried = {change: in_child(each) for change, each in attempts.items()}
        return [Outcome(change, each["result"], each["how"]) for change, each in tried.items() if each["result"]]


def in_child(attempt: Callable[[], Any]) -> dict[str, str]:
    """Return the outcome of an attempt made in a forked process, which a kernel may end."""

    def answer() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the message of an allocator that aborts
        sender.send(vars(attempt()))

    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=answer)
    child.start()
    sender.close()
    outcome: dict[str, str] = {}
    with contextlib.suppress(EOFError):
        outcome = receiver.recv()
    child.join()
    if outcome and child.exitcode == 0:
        return outcome
    if child.exitcode is not None and child.exitcode < 0:
        return {"result": "killed", "how": f"the kernel ends the process (signal {-child.exitcode})"}
    return {"result": "survived", "how": "child failed"}


def page(package: Bridge | Rules, outcomes: dict[str, list[Outcome]], command: str, counts: str) -> str:
    import torch

    lines = [f"# {package.title}", "", package.text, f"Repeat: `{command}`.", "", counts, ""]
    lines += ["| mutated | killed | how the first was noticed |", "|---|---|---|"]
    for name, tried in outcomes.items():
        killed = sum(each.result == "killed" for each in tried)
        how = tried[0].how if tried else NEEDS_CUDA.get(name, "no mutation changes a plan")
        cell = how.replace("|", "\\|").replace("`", "'")
        lines.append(f"| {name} | {killed} of {len(tried)} | `{cell}` |")
    return "\n".join([*lines, "", f"Python {platform.python_version()}, torch {torch.__version__}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=("bridge", "rules"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the outcomes as a page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = (Bridge if arguments.package == "bridge" else Rules)(Path(folder))
        unknown = sorted(set(arguments.names) - set(package.names))
        if unknown:
            parser.error(f"nothing named {', '.join(unknown)}; there are: {'; '.join(package.names)}")
        chosen = [name for name in package.names if not arguments.names or name in arguments.names]
        if wrong := package.wrong_without(chosen):
            print(f"wrong without any mutation:\n{wrong}")
            return 1
        outcomes: dict[str, list[Outcome]] = {}
        for name in chosen:
            begin = time.monotonic()
            outcomes[name] = package.attempt(name)
            alive = [f"{each.mutation} {each.result}" for each in outcomes[name] if each.result != "killed"]
            count = f"{len(outcomes[name]) - len(alive)}/{len(outcomes[name])}"
            print(f"{count:>6} {time.monotonic() - begin:6.1f} s  {name}  {', '.join(alive)}", flush=True)
        every = [each for tried in outcomes.values() for each in tried]
        killed = sum(each.result == "killed" for each in every)
        counts = f"{len(outcomes)} rows, {len(every)} mutations: {killed} killed, {len(every) - killed} survived."
        print(counts)
        if arguments.page:
            command = f"python tools/mutate.py {arguments.package} --page {arguments.page}"
            arguments.page.write_text(page(package, outcomes, command, f"**{counts}**"))
    return 0 if killed == len(every) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
