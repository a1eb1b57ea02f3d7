"""dp-partition with its compute compiled by inductor, against DistributedDataParallel and the eager backend.

    python packages/dp-partition/benchmarks/bench_inductor.py [--json FILE] [--rounds 40]

All steps run in one process for each rank, one after the other in an order that is shuffled in every round. Their
losses are compared with those of the eager backend.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_partition as eager
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

CASES: dict[str, dict[str, Any]] = {"replicate": {"style": "replicate"}}


def measure(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """One rank's part; rank 0 reports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(folder + "/store", eager.WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=eager.WORLD, store=store)
    mesh = init_device_mesh("cpu", (eager.WORLD,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(rank)
    (batch,) = eager.models.tokens(generator, rows=4, vocabulary=512, length=64)
    runs: dict[str, eager.Run] = {"ddp": eager.ddp(batch)}
    first: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name, settings in CASES.items():
        for backend in ("eager", "inductor"):
            run = eager.ours(mesh, batch, backend=backend, **settings)
            start = time.perf_counter()
            losses[f"{name} {backend}"] = [run().item()]
            first[f"{name} {backend}"] = time.perf_counter() - start
            losses[f"{name} {backend}"] += [run().item() for _ in range(4)]
            runs[f"{name} {backend}"] = run
    seconds = eager.interleaved(runs, rounds)
    steps = {name: run for name, run in runs.items() if isinstance(run, partial)}
    pieces = {name: run.func.num_compiled for name, run in steps.items() if isinstance(run.func, eager.dp.Step)}
    if rank == 0:
        queue.put({"seconds": seconds, "first": first, "losses": losses, "pieces": pieces})
    dist.barrier()
    dist.destroy_process_group()


def rows_of(facts: dict[str, Any]) -> list[dict[str, str]]:
    seconds, rows = facts["seconds"], []
    for style, peer, target in (("replicate", "ddp", "<= 0.85x"),):
        own, shown = seconds[f"{style} inductor"], {"ddp": "DDP"}[peer]
        rows.append(eager.compared(f"{style}, inductor", target, own, shown, seconds[peer]))
        plain = seconds[f"{style} eager"]
        rows.append(eager.compared(f"{style}, inductor against eager", "< 1.00x", own, "eager backend", plain))
        pairs = list(zip(facts["losses"][f"{style} inductor"], facts["losses"][f"{style} eager"], strict=True))
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        what = f"losses of {len(pairs)} steps, {style}"
        rows.append(eager.row(what, "within 1e-4", f"{worst:.1e} apart", "eager backend"))
        taken, eagerly = facts["first"][f"{style} inductor"], facts["first"][f"{style} eager"]
        what = f"first call, {style}, {facts['pieces'][f'{style} inductor']} compiled pieces"
        rows.append(eager.row(what, "-", f"{taken:.1f} s", f"eager backend: {eagerly:.1f} s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    result = {
        "title": f"Steps compiled by inductor on {eager.WORLD} ranks: GPT of 4 layers, width 192, fused AdamW, gloo",
        "command": "python packages/dp-partition/benchmarks/bench_inductor.py",
        "rows": rows_of(eager.on_ranks(measure, options.rounds, timeout=1200)),
    }
    if options.json:
        options.json.write_text(json.dumps(result))
    for one in result["rows"]:
        print(f"{one['what']:48} {one['target']:12} {one['measured']:48} {one['peer']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
