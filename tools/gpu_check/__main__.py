#!/usr/bin/env python3
"""Checks that need a GPU, in one run.

    python3 tools/gpu_check --out FOLDER             on a GPU machine, from the source tree, nothing installed
    python3 tools/gpu_check --out FOLDER --dry-run   prints the plan and runs on the CPU, small, what can run there

Needs torch >= 2.11, pytest and Python >= 3.11. Each section runs in a process of its own with a time limit, so that one
that fails, hangs or crashes does not lose the others. FOLDER gets `gpu_check.json` and `gpu_check.md`, rewritten after
each section. Several NCCL ranks on one GPU need NCCL 2.30 (`LD_PRELOAD` a newer `libnccl.so.2` if torch has an older
one); without it the multi-rank suites run over gloo on CUDA tensors, and NCCL is exercised with one rank.

Exit code: 0 if every section ran and every claim held, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a folder: `gpu_check` lies beside, not within

from gpu_check.collectives import environment, nccl_one_rank, sync_debug
from gpu_check.common import Result, Settings
from gpu_check.memory import allocator_peaks
from gpu_check.partition import lowering
from gpu_check.reshard import pack_bandwidth
from gpu_check.suites import child_environment, suites_gloo, suites_nccl


@dataclass(frozen=True)
class Section:
    """One part of the check: a function that runs in its own process, and its limit."""

    run: Callable[[Settings], Result]
    seconds: int
    about: str

    @property
    def name(self) -> str:
        """The function's name with dashes."""
        return self.run.__name__.replace("_", "-")


SECTIONS = [
    Section(environment, 120, "versions and the device"),
    Section(nccl_one_rank, 180, "collectives under NCCL with one rank"),
    Section(sync_debug, 240, "no waits for the device after the first call"),
    Section(pack_bandwidth, 240, "pack and unpack bandwidth of shard-reshard"),
    Section(allocator_peaks, 180, "allocator peaks against promises"),
    Section(lowering, 420, "dp-partition through inductor and as CUDA graphs"),
    Section(suites_nccl, 560, "packages' multi-rank tests under NCCL on one GPU"),
    Section(suites_gloo, 560, "packages' multi-rank tests over gloo on CUDA tensors"),
]


def run_section(section: Section, arguments: argparse.Namespace) -> Result:
    """Run a section in its own process group and time limit."""
    entry: Result = {"section": section.name, "about": section.about}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).parent), "--run-section", section.name, "--result", str(result)]
        command += ["--out", str(arguments.out), "--ranks", str(arguments.ranks), "--keyword", arguments.keyword]
        command += ["--dry-run"] if arguments.dry_run else []
        start = time.monotonic()
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
            )
            try:
                code: int | None = process.wait(section.seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, 9)
                process.wait()
            log.seek(0)
            text = log.read()
        entry["seconds"] = round(time.monotonic() - start, 1)
        if code == 0 and result.exists():
            entry |= json.loads(result.read_text())
            holds = all(found["holds"] for found in entry.get("claims", []))
            entry["status"] = (
                "not run" if isinstance(entry.get("not_run"), str) else "good" if holds else "claims failed"
            )
        else:
            entry["status"] = (
                f"timed out after {section.seconds} s" if code is None else f"failed with exit code {code}"
            )
            entry["log"] = text[-4000:]
    return entry


def write_report(folder: Path, entries: list[Result], dry: bool) -> None:
    """`gpu_check.json` and `gpu_check.md`."""
    (folder / "gpu_check.json").write_text(
        json.dumps({"dry_run": dry, "sections": entries}, indent=1, default=str) + "\n"
    )
    lines = ["# GPU check" + (" (dry run on the CPU)" if dry else ""), ""]
    lines += table([{"section": e["section"], "status": e["status"], "seconds": e["seconds"]} for e in entries])
    for entry in entries:
        lines += ["", f"## {entry['section']}: {entry['about']}", ""]
        plain = {k: v for k, v in entry.items() if k not in ("section", "about", "rows", "claims", "log", "seconds")}
        lines += [f"- {key}: {value}" for key, value in plain.items()]
        lines += ["", *table(entry["rows"])] if entry.get("rows") else []
        lines += ["", *table(entry["claims"])] if entry.get("claims") else []
        lines += ["", "```", entry["log"], "```"] if entry.get("log") else []
    (folder / "gpu_check.md").write_text("\n".join(lines) + "\n")


def table(rows: list[Result]) -> list[str]:
    """A markdown table; lists are given as their length."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        values = [len(row[c]) if isinstance(row.get(c), list) else row.get(c, "") for c in columns]
        lines.append("| " + " | ".join(re.sub(r"[\n|]+", " ", str(value))[:300] for value in values) + " |")
    for row in rows:
        lines += [f"- {failure}" for failure in row.get("failures", [])]
    return lines


def main(argv: list[str]) -> int:
    """Run the chosen sections one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and gpu_check.md")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; run on the CPU what can run there")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], metavar="SECTION")
    parser.add_argument("--ranks", type=int, default=4, help="ranks per GPU in the suites (default: 4)")
    parser.add_argument("--keyword", default="", help="which tests of the suites (pytest -k)")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    chosen = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]

    if arguments.run_section:
        (section,) = [section for section in SECTIONS if section.name == arguments.run_section]
        found = section.run(Settings(arguments.dry_run, arguments.ranks, arguments.keyword))
        arguments.result.write_text(json.dumps(found, default=str))
        return 0

    if arguments.dry_run:
        print("plan:")
        for section in chosen:
            print(f"  {section.name}: {section.about}; at most {section.seconds} s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    entries: list[Result] = []
    for section in chosen:
        entries.append(run_section(section, arguments))
        print(f"{section.name}: {entries[-1]['status']}, {entries[-1]['seconds']} s", flush=True)
        write_report(arguments.out, entries, arguments.dry_run)
    print(f"report: {arguments.out / 'gpu_check.md'}")
    return 0 if all(entry["status"] in ("good", "not run") for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
