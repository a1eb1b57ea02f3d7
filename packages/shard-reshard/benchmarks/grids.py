"""The long runs behind the tests' samples: random layout pairs, programs on odd tensors, broken safetensors files.

    python packages/shard-reshard/benchmarks/grids.py [--pairs 10000] [--programs 12000] [--files 20000]
        [--markdown FILE]

The tests of the package walk the same code on smaller samples. Exits with an error at the first wrong result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> None:
    """Run the grids and say what was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--programs", type=int, default=12_000)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--markdown", metavar="FILE")
    arguments = parser.parse_args()
    command = (
        f"python packages/shard-reshard/benchmarks/grids.py --pairs {arguments.pairs} "
        f"--programs {arguments.programs} --files {arguments.files}"
    )
    lines = [
        "# shard-reshard: long random runs",
        "",
        f"`{command}`: the tests run a sample of this. A wrong result ends the run.",
        "Without options it runs 10,000 pairs, 12,000 programs and 20,000 files.",
        "",
        "| what | how many | seconds |",
        "|---|---|---|",
        _pairs(arguments.pairs),
        _programs(arguments.programs),
        _files(arguments.files),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text)


def _pairs(count: int) -> str:
    from random_pairs import check_pairs

    begin = time.perf_counter()
    counts = check_pairs(count, seed=0)
    about = (
        "pairs of random layouts on 1 to 4 ranks, every element compared "
        f"({counts.elements} elements), bytes on the wire equal to the bound; {counts.bounded} of the pairs under "
        f"`max_workspace_bytes`, which held on every rank, {counts.in_rounds} of them in 2 to "
        f"{counts.most_rounds} rounds"
    )
    return f"| {about} | {counts.pairs} | {time.perf_counter() - begin:.0f} |"


def _programs(count: int) -> str:
    from random_moves import check_programs

    begin = time.perf_counter()
    counts = check_programs(count, seed=1)
    often = ", ".join(f"{kind} {times}" for kind, times in sorted(counts.odd.items()))
    about = (
        f"programs of one to three random plans ({counts.plans} plans) on 1 to 5 ranks, {counts.elements} elements "
        f"compared byte for byte, {counts.guards} bytes beside strided destinations found untouched; how often: {often}"
    )
    return f"| {about} | {counts.programs} | {time.perf_counter() - begin:.0f} |"


def _files(count: int) -> str:
    from broken_files import broken_files, check_one
    from hypothesis import HealthCheck, given, settings

    counts = {True: 0, False: 0}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:

        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(broken_files())
        def check(data: bytes) -> None:
            counts[check_one(data, Path(folder) / "f")] += 1

        check()
    about = (
        f"broken safetensors files: {counts[False]} refused with `invalid-file`, {counts[True]} accepted, "
        "in which the format's own library finds the same tensors; nothing else happened"
    )
    return f"| {about} | {sum(counts.values())} | {time.perf_counter() - begin:.0f} |"


if __name__ == "__main__":
    main()
