"""Run every package's benchmarks and keep their tables under docs/benchmarks.

    python tools/bench.py                        all of them        (nox -s bench)
    python tools/bench.py shard-reshard          one package's      (nox -s bench -- shard-reshard)

A benchmark is a script `packages/<dist>/benchmarks/bench_*.py` that takes `--json FILE` and writes
`{"title": str, "command": str, "rows": [{"what": str, "target": str, "measured": str, "peer": str}, ...]}`; it compares
against its peers in one interleaved run. A row without a peer's or a floor's figure is an error here. It may add
`"curves": [{"name": str, "title": str, "x": str, "y": str, "see": str, "series": {label: [[x, times], ...]}}, ...]`, of
at least two series, which are drawn on logarithmic axes; a script may have curves alone. `times` are the seconds of all
runs at `x`; `see` is one sentence on what the plot shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import repo

OUT = repo.ROOT / "docs" / "benchmarks"


def scripts(names: list[str]) -> list[tuple[str, Path]]:
    """Return package and script of every benchmark of the named packages; of all packages where none is named."""
    scripts_of = {name: sorted((p.path / "benchmarks").glob("bench_*.py")) for name, p in repo.packages().items()}
    unknown = [name for name in names if name not in scripts_of]
    if unknown:
        raise SystemExit(f"bench: no benchmarks of {', '.join(unknown)}; there are {', '.join(scripts_of)}")
    return [(name, script) for name in names or scripts_of for script in scripts_of[name]]


def machine() -> str:
    import torch

    cpu = platform.processor() or platform.machine()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{device}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def run(script: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        subprocess.run([sys.executable, str(script), "--json", str(file)], check=True)
        result: dict[str, Any] = json.loads(file.read_text())
    bare = [row["what"] for row in result["rows"] if not row.get("peer")]
    bare += [curve["name"] for curve in result.get("curves", ()) if len(curve["series"]) < 2]
    if bare:
        raise SystemExit(f"bench: {script.name} measures without a peer: {', '.join(bare)}")
    if not result["rows"] and not result.get("curves"):
        raise SystemExit(f"bench: {script.name} measured nothing")
    return result


def table(result: dict[str, Any]) -> str:
    lines = [f"## {result['title']}", "", f"`{result['command']}`", ""]
    if result["rows"]:
        lines += ["| what | target | measured | peer |", "|---|---|---|---|"]
    lines += [f"| {r['what']} | {r['target']} | {r['measured']} | {r['peer']} |" for r in result["rows"]]
    return "\n".join(lines) + "\n"


def draw(name: str, curve: dict[str, Any]) -> str:
    """Draw one plot beside the page; returns the lines that show it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "shardworks"  # the same figures give the same file
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
    for (label, points), marker in zip(curve["series"].items(), "osD^vP*X" * 4, strict=False):
        x, runs = zip(*points, strict=True)
        axes.loglog(x, list(map(statistics.median, runs)), marker=marker, label=label)
        axes.fill_between(x, list(map(min, runs)), list(map(max, runs)), alpha=0.15)
    axes.set(title=curve["title"], xlabel=curve["x"], ylabel=f"{curve['y']} (band: least to most)")
    plain = ticker.FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e5 else f"{value / 1e6:g} M")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(ticker.EngFormatter(unit="s"))
    axes.grid(visible=True, which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=1 if max(map(len, curve["series"])) > 24 else 2)
    file = f"{name}-{curve['name']}.svg"
    figure.savefig(OUT / file, metadata={"Date": None})
    pyplot.close(figure)
    return f"![{curve['title']}]({file})\n\n{curve['see']}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    # A page is written when its package is done: a script of the next one may fail.
    for name, group in itertools.groupby(scripts(arguments.package), key=lambda each: each[0]):
        tables, plots = [], []
        for _, script in group:
            print(f"bench: {script.relative_to(repo.ROOT)}", flush=True)
            result = run(script)
            plots += [draw(name, curve) for curve in result.get("curves", ())]
            tables.append(table(result))
        head = f"# Benchmarks of {name}\n\n{machine()}; {date.today()}. Repeat: `nox -s bench -- {name}`.\n\n"
        (OUT / f"{name}.md").write_text(head + "\n".join([*plots, *tables]))
        print(head + "\n".join(tables), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
