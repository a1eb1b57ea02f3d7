"""Steps with the bridge over tensors and over parameters, beside its peers.

    python packages/tp-ddp-bridge/benchmarks/bench_scaling.py [--json FILE] [--repeats 5]

CPU seconds a rank (`process_time`) of one step on 2 x 2 gloo ranks, median of interleaved runs; what a step is stands
in `bench_bridge.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_bridge
import torch
import torch.distributed as dist

Times = list[float]
Series = dict[str, list[tuple[float, Times]]]  # each x with the seconds of its runs
MAKERS: dict[str, Any] = {
    "bridge": bench_bridge._bridge,
    "buckets by hand": bench_bridge._by_hand,
    "torch DDP(device_mesh=)": bench_bridge._torch_bridge,
    "FSDP2": bench_bridge._fsdp2,
}
TENSORS = (12, 36, 100, 300)
WIDTHS = (32, 128, 512)


def steps(mesh: Any, tensors: int, repeats: int) -> dict[str, Times]:
    """CPU seconds a rank of a step, by variant; those that refuse are left out."""
    x = torch.randn(
        bench_bridge.BATCH, bench_bridge.WIDTH, generator=torch.Generator().manual_seed(dist.get_rank() // 2)
    )
    calls: dict[str, Callable[[], None]] = {}
    for name, make in MAKERS.items():
        try:
            calls[name] = bench_bridge._step(*make(mesh, tensors), x)
        except Exception as error:  # a peer that cannot do it has no point here
            print(f"{name}, {tensors} tensors: {type(error).__name__}")
    times = bench_bridge._interleaved(calls, repeats)
    return {name: [each / bench_bridge.RANKS for each in seconds] for name, seconds in times.items()}


def wrapping(mesh: Any, tensors: int, repeats: int) -> dict[str, Times]:
    """Wall seconds of wrapping a model, on the slowest rank."""
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in ("bridge", "torch DDP(device_mesh=)", "FSDP2"):
            dist.barrier()
            begin = time.perf_counter()
            MAKERS[name](mesh, tensors)  # making the model is in it, for all alike
            spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            seconds.setdefault(name, []).append(float(spent))
    return seconds


def curves(mesh: Any, repeats: int) -> list[dict[str, Any]]:
    by_tensors: Series = {}
    by_width: Series = {}
    by_wrap: Series = {}
    for tensors in TENSORS:
        _add(by_tensors, tensors, steps(mesh, tensors, repeats))
        _add(by_wrap, tensors, wrapping(mesh, tensors, 3))
    for width in WIDTHS:
        bench_bridge.WIDTH = width
        numel = 36 // 4 * (4 * width * width + 3 * width)
        _add(by_width, numel, steps(mesh, 36, repeats))
    step = "CPU time of a rank"
    see = "The bridge does what buckets by hand do, and makes one view of each parameter in each forward."
    return [
        _curve("tensors", "A step, width 64, 2 x 2 ranks", "tensors", step, by_tensors, see),
        _curve("parameters", "A step, 36 tensors, 2 x 2 ranks", "parameters", step, by_width, see),
        _curve(
            "wrapping",
            "Making and wrapping the model, 2 x 2 ranks",
            "tensors",
            "time",
            by_wrap,
            "Wrapping is done once; its time grows with the tensors.",
        ),
    ]


def _add(series: Series, x: float, times_by_name: dict[str, Times]) -> None:
    for name, times in times_by_name.items():
        series.setdefault(name, []).append((x, times))


def _curve(name: str, title: str, x: str, y: str, series: Series, see: str) -> dict[str, Any]:
    return {"name": name, "title": title, "x": x, "y": y, "series": series, "see": see}


def _rank(rank: int, folder: str, repeats: int, results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks = bench_bridge.RANKS
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    series = curves(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), repeats)
    if rank == 0:
        results.put(series)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the points, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=_rank, args=(rank, folder, arguments.repeats, results))
            for rank in range(bench_bridge.RANKS)
        ]
        for worker in workers:
            worker.start()
        series = results.get()
        for worker in workers:
            worker.join()
    for curve in series:
        for label, points in curve["series"].items():
            print(f"{curve['name']}: {label}: {', '.join(f'{x:g} {statistics.median(y):.3g}' for x, y in points)}")
    if arguments.json:
        command = "python packages/tp-ddp-bridge/benchmarks/bench_scaling.py"
        document = {"title": "Scaling", "command": command, "rows": [], "curves": series}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
