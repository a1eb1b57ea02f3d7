"""How the host time of a styled MLP, and styling a model, grow with parameters, ranks and tensors.

    python packages/tp-styles/benchmarks/bench_scaling.py [--json FILE]

Host time is CPU time of a thread (`time.thread_time`) for a forward and backward, median of interleaved rounds: what
the styles cost beside the arithmetic. Peers: torch's styles, and collectives written by hand.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import bench_styles
import torch
import tp_styles as tp
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_tp

Times = list[float]
Series = dict[str, list[tuple[float, Times]]]  # each x with the seconds of its runs
WIDTHS = (32, 128, 512, 1024)


def widths(mesh: DeviceMesh) -> Series:
    """Forward and backward of the MLP of `bench_styles`, wider and wider; x counts its parameters."""
    series: Series = {}
    bench_styles.ROUNDS, bench_styles.CALLS = 9, 10
    for width in WIDTHS:
        bench_styles.WIDTH = bench_styles.HIDDEN = width
        by_kind = bench_styles.overhead(mesh)["forward and backward"]
        numel = 2 * width * width + 2 * width
        for name, times in by_kind.items():
            series.setdefault(name, []).append((numel, _seconds(times)))
    return series


def _seconds(microseconds: dict[str, float]) -> Times:
    return [value / 1e6 for value in microseconds.values()]


def one_width(mesh: DeviceMesh) -> dict[str, Times]:
    """The same at width 256."""
    bench_styles.ROUNDS, bench_styles.CALLS = 9, 10
    by_kind = bench_styles.overhead(mesh)["forward and backward"]
    return {name: _seconds(times) for name, times in by_kind.items()}


def ranks_series() -> Series:
    series: Series = {}
    for ranks in (2, 4, 8):
        for name, seconds in on_ranks(one_width, ranks).items():
            series.setdefault(name, []).append((ranks, seconds))
    return series


def applying(mesh: DeviceMesh) -> Series:
    """Styling a stack of MLPs, 4 tensors each, by one plan with a pattern; wall time of rank 0."""
    styles = {"*.up": tp.ColwiseParallel(), "*.down": tp.RowwiseParallel()}
    theirs = {"*.up": torch_tp.ColwiseParallel(), "*.down": torch_tp.RowwiseParallel()}
    bench_styles.WIDTH = bench_styles.HIDDEN = 64
    series: Series = {"apply_plan": [], "torch": []}
    for layers in (1, 4, 16, 64):
        stack = nn.Sequential(*(bench_styles.MLP() for _ in range(layers)))
        times: dict[str, list[float]] = {name: [] for name in series}
        for _ in range(3):
            calls: dict[str, Any] = {
                "apply_plan": lambda model: tp.apply_plan(model, mesh, styles),
                "torch": lambda model: torch_tp.parallelize_module(model, mesh, theirs),  # type: ignore[arg-type]  # a dict of styles
            }
            for name, call in calls.items():
                model = copy.deepcopy(stack)
                torch.distributed.barrier()
                begin = time.perf_counter()
                call(model)
                times[name].append(time.perf_counter() - begin)
        for name, seconds in times.items():
            series[name].append((4 * layers, seconds))
    return series


def _curve(name: str, title: str, x: str, y: str, series: Series, see: str) -> dict[str, Any]:
    return {"name": name, "title": title, "x": x, "y": y, "series": series, "see": see}


def main() -> int:
    """Print the points, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    host = "host time, forward and backward"
    see = "The distance to the hand-written line is what styles cost the host; arithmetic makes it small."
    curves = [
        _curve("parameters", "MLP on 2 ranks, 8 tokens", "parameters", host, on_ranks(widths, 2), see),
        _curve("ranks", "MLP of width 256, 8 tokens", "ranks (of one machine)", host, ranks_series(), see),
        _curve(
            "tensors",
            "Styling a model on 2 ranks",
            "tensors",
            "time",
            on_ranks(applying, 2),
            "Styling is done once; its time grows with the tensors.",
        ),
    ]
    for curve in curves:
        for label, points in curve["series"].items():
            print(f"{curve['name']}: {label}: {', '.join(f'{x:g} {statistics.median(y):.3g}' for x, y in points)}")
    if options.json:
        command = "python packages/tp-styles/benchmarks/bench_scaling.py"
        document = {"title": "Scaling", "command": command, "rows": [], "curves": curves}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
