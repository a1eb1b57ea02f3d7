"""How a move grows with bytes, tensors and ranks, and a plan with ranks, beside torch and a raw all-to-all.

    python packages/shard-reshard/benchmarks/bench_scaling.py [--json FILE] [--repeats 7]

Points are medians of interleaved runs on gloo ranks of one machine. With more ranks than cores, a move takes longer for
that reason alone: what is to be compared is the distance to the raw collective.
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

import torch
import torch.distributed as dist

Times = list[float]
Series = dict[str, list[tuple[float, Times]]]  # each x with the seconds of its runs
MB = 1 << 20


def on_ranks(part: Callable[[int], list[dict[str, Any]]], ranks: int, repeats: int) -> list[dict[str, Any]]:
    """What ``part(repeats)`` gives on rank 0 of ``ranks`` gloo processes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=_rank, args=(rank, ranks, folder, part, repeats, results)) for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        rows: list[dict[str, Any]] = results.get()
        for worker in workers:
            worker.join()
    return rows


def _rank(rank: int, ranks: int, folder: str, part: Any, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    rows = part(repeats)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Seconds of each call on the slowest rank."""
    from bench_reshard import _interleaved

    return _interleaved(calls, repeats)


def _one_size(num_bytes: int, repeats: int) -> dict[str, Times]:
    """One float32 tensor, rows to columns, over all ranks."""
    from shard_reshard import Resharder, plan_reshard
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    ranks, rank = dist.get_world_size(), dist.get_rank()
    side = max(ranks, int((num_bytes / 4) ** 0.5) // ranks * ranks)
    plan = plan_reshard((side, side), torch.float32, f"{ranks}: S(0)", f"{ranks}: S(1)")
    local, out = torch.randn(plan.src.local_shapes(rank)[0]), torch.empty(plan.dst.local_shapes(rank)[0])
    resharder = Resharder(plan)
    dtensor = DTensor.from_local(local, init_device_mesh("cpu", (ranks,)), (Shard(0),), run_check=False)
    flat, flat_out = torch.randn(local.numel()), torch.empty(local.numel())
    calls: dict[str, Callable[[], Any]] = {
        "shard-reshard": lambda: resharder(local, out=out),
        "raw all_to_all_single": lambda: dist.all_to_all_single(flat_out, flat),
        "DTensor.redistribute": lambda: dtensor.redistribute(placements=(Shard(1),)),
    }
    return timed(calls, repeats)


def bytes_part(repeats: int) -> list[dict[str, Any]]:
    series: Series = {}
    for num_bytes in (16 << 10, 128 << 10, MB, 8 * MB, 64 * MB):
        for name, seconds in _one_size(num_bytes, repeats).items():
            series.setdefault(name, []).append((num_bytes / MB, seconds))
    return [
        _curve(
            "bytes",
            "One tensor on 4 ranks, rows to columns",
            "MiB of the tensor",
            series,
            "The distance to the raw collective is packing and unpacking.",
        )
    ]


def tensors_part(repeats: int) -> list[dict[str, Any]]:
    """Tensors of 64 KB, by one kept plan and one by one."""
    from bench_reshard import _fused
    from shard_reshard import reshard_state_dict
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    ranks, side = dist.get_world_size(), 128
    mesh = init_device_mesh("cpu", (ranks,))
    series: Series = {}
    for count in (1, 4, 16, 64, 256):
        state = {
            f"layer{at}": DTensor.from_local(torch.randn(side // ranks, side), mesh, (Shard(0),), run_check=False)
            for at in range(count)
        }
        flat, flat_out = torch.randn(count * side * side // ranks), torch.empty(count * side * side // ranks)
        calls: dict[str, Callable[[], Any]] = {
            "shard-reshard, plan kept": _fused(state)[0],
            "reshard_state_dict": lambda state=state: reshard_state_dict(state, (mesh, (Shard(1),))),
            "raw all_to_all_single": lambda a=flat_out, b=flat: dist.all_to_all_single(a, b),
            "DTensor.redistribute, one by one": lambda state=state: [
                tensor.redistribute(placements=(Shard(1),)) for tensor in state.values()
            ],
        }
        for name, seconds in timed(calls, repeats).items():
            series.setdefault(name, []).append((count, seconds))
    return [
        _curve(
            "tensors",
            "Tensors of 64 KB on 4 ranks, rows to columns",
            "tensors",
            series,
            "One collective for all tensors keeps near the raw one; one call a tensor does not.",
        )
    ]


def ranks_curve(repeats: int) -> dict[str, Any]:
    """16 MiB in all, over 2, 4 and 8 ranks."""
    series: Series = {}
    for ranks in (2, 4, 8):
        for name, seconds in on_ranks(_sixteen, ranks, repeats)[0].items():
            series.setdefault(name, []).append((ranks, seconds))
    return _curve(
        "ranks",
        "A tensor of 16 MiB, rows to columns",
        "ranks (of one machine)",
        series,
        "More ranks than cores take longer for all of them; compare the lines at one number of ranks.",
    )


def _sixteen(repeats: int) -> list[dict[str, Any]]:
    return [_one_size(16 * MB, repeats)]


def planning_curve(repeats: int) -> dict[str, Any]:
    """Own part of a plan of rows to columns, beside torch's metadata of both layouts."""
    from bench_reshard import _forget_plans, _torch_spec
    from shard_reshard.planning import plan_reshard
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    series: Series = {"shard-reshard: own part of the plan": [], "torch: metadata of both layouts, no plan": []}
    ours, torchs = series
    for ranks in (8, 64, 512, 4096):

        def plan(ranks: int = ranks) -> None:
            _forget_plans()
            plan_reshard((8192, 8192), "bfloat16", f"{ranks}: S(0)", f"{ranks}: S(1)").rank_schedule(3)

        def metadata(ranks: int = ranks) -> None:
            for dim in (0, 1):
                _torch_spec(dim, list(range(ranks))).build_metadata(torch.Size((8192, 8192)), TensorProperties())

        for name, call in ((ours, plan), (torchs, metadata)):
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            series[name].append((ranks, times))
    return _curve(
        "planning",
        "A plan for one tensor, rows to columns, nothing cached",
        "ranks",
        series,
        "A rank plans its own part, so its time grows slower than metadata of all ranks.",
    )


def _curve(name: str, title: str, x: str, series: Series, see: str) -> dict[str, Any]:
    return {"name": name, "title": title, "x": x, "y": "time", "series": series, "see": see}


def main() -> None:
    """Print the points, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    curves = [*on_ranks(bytes_part, 4, repeats), *on_ranks(tensors_part, 4, repeats), ranks_curve(repeats)]
    curves.append(planning_curve(repeats))
    for curve in curves:
        for label, points in curve["series"].items():
            print(f"{curve['name']}: {label}: {', '.join(f'{x:g} {statistics.median(y):.3g}' for x, y in points)}")
    if arguments.json:
        command = "python packages/shard-reshard/benchmarks/bench_scaling.py"
        document = {"title": "Scaling", "command": command, "rows": [], "curves": curves}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
