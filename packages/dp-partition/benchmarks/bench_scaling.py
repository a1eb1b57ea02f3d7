"""How a step grows with parameters, tracing with layers, and an estimate with ranks and layers.

    python packages/dp-partition/benchmarks/bench_scaling.py [--json FILE] [--rounds 7]

Peers take turns within one process for each rank: DistributedDataParallel, FSDP2 per block, and one eager step as the
floor of what tracing costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import bench_partition as bench
import torch
import torch.distributed as dist
from bench_partition import GPT, WORLD, adamw, dp, models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

Times = list[float]
Series = dict[str, list[tuple[float, Times]]]  # each x with the seconds of its runs
WIDTHS, LAYERS, RANKS = (64, 128, 256), (1, 2, 4), (8, 64, 512, 4096)


def gpt(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=layers, width=width, vocabulary=256, length=32)


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def steps(width: int, mesh: Any, rounds: int) -> tuple[int, dict[str, Times]]:
    """Parameters of a GPT of 2 layers, and seconds of one step of each kind on the slowest rank."""
    (batch,) = models.tokens(torch.Generator().manual_seed(dist.get_rank()), rows=4, vocabulary=256, length=32)
    runs: dict[str, Callable[[], Any]] = {}
    for style in ("replicate", "fully_shard"):
        model = gpt(2, width)
        step = dp.compile(models.token_step, mesh=mesh, style=style)
        runs[f"dp-partition, {style}"] = partial(step, model, adamw(model), batch)
    plain = nn.parallel.DistributedDataParallel(gpt(2, width))
    runs["DDP"] = partial(models.token_step, plain, adamw(plain), batch)
    sharded: Any = gpt(2, width)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    runs["FSDP2 per block"] = partial(models.token_step, sharded, adamw(sharded), batch)
    for run in runs.values():
        run()
    seconds = bench.interleaved(runs, rounds)
    return numel(plain), seconds


def first_calls(layers: int, mesh: Any) -> dict[str, Times]:
    """Seconds of a first call, which traces, and of an eager step."""
    (batch,) = models.tokens(torch.Generator(), rows=2, vocabulary=256, length=32)
    seconds: dict[str, list[float]] = {}
    for _ in range(2):
        for style in ("replicate", "fully_shard"):
            model = gpt(layers, 64)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
            step = dp.compile(models.token_step, mesh=mesh, style=style)
            begin = time.perf_counter()
            step(model, optim, batch)
            seconds.setdefault(f"first call, {style}", []).append(time.perf_counter() - begin)
            step.release()
        eager = gpt(layers, 64)
        optim = torch.optim.AdamW(eager.parameters(), lr=1e-3)
        models.token_step(eager, optim, batch)
        begin = time.perf_counter()
        models.token_step(eager, optim, batch)
        seconds.setdefault("one eager step", []).append(time.perf_counter() - begin)
    return seconds


def measure(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """One rank's part; rank 0 reports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(folder + "/store", WORLD))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    by_size: Series = {}
    by_layers: Series = {}
    for width in WIDTHS:
        number, times = steps(width, mesh, rounds)
        for name, seconds in times.items():
            by_size.setdefault(name, []).append((number, seconds))
    for layers in LAYERS:
        for name, seconds in first_calls(layers, mesh).items():
            by_layers.setdefault(name, []).append((layers, seconds))
    if rank == 0:
        queue.put((by_size, by_layers))
    dist.barrier()
    dist.destroy_process_group()


def estimates() -> Series:
    """Seconds of `estimate` on the meta device: tracing once, whatever the number of ranks."""
    series: Series = {"fully_shard, 4 layers": [], "replicate, 4 layers": [], "fully_shard, 1 layer": []}
    for ranks in RANKS:
        for name, points in series.items():
            with torch.device("meta"):
                model = gpt(int(name.split(", ")[1][0]), 512)
                ids = torch.zeros(1, 32, dtype=torch.long)
            style, seconds = name.split(",")[0], []
            for _ in range(3):
                begin = time.perf_counter()
                dp.estimate(models.token_step, model, adamw(model), (ids, ids), world=ranks, style=style)  # type: ignore[arg-type]  # a style's name
                seconds.append(time.perf_counter() - begin)
            points.append((ranks, seconds))
    return series


def main() -> int:
    """Print the points, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    by_size, by_layers = bench.on_ranks(measure, options.rounds)
    parts = [
        ("parameters", f"A step of a GPT of 2 layers on {WORLD} ranks, fused AdamW", "parameters", by_size,
         "Compare each style with the peer that lays parameters out the same way: DDP, FSDP2."),
        ("layers", f"Tracing a GPT of width 64 on {WORLD} ranks", "layers", by_layers,
         "A first call traces once; its time grows with the layers, not with the ranks."),
        ("ranks", "An estimate of a GPT of width 512 on the meta device", "ranks", estimates(),
         "An estimate traces once, so its time stays flat as ranks are added."),
    ]  # fmt: skip
    curves = [dict(zip(("name", "title", "x", "series", "see"), part, strict=True), y="time") for part in parts]
    for name, _, _, series, _ in parts:
        for label, points in series.items():
            print(f"{name}: {label}: {', '.join(f'{x:g} {statistics.median(y):.3g}' for x, y in points)}")
    if options.json:
        command = "python packages/dp-partition/benchmarks/bench_scaling.py"
        document = {"title": "Scaling", "command": command, "rows": [], "curves": curves}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
