"""dp-partition with its compute compiled by inductor, against DDP (compiled as well), FSDP2 and the eager backend.

    python packages/dp-partition/benchmarks/bench_inductor.py [--json FILE] [--rounds 40]

All steps run in one process for each rank, one after the other in an order that is shuffled in every round. Their
losses are compared with those of the eager backend.
"""

from __future__ import annotations

import os
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

CASES: dict[str, dict[str, Any]] = {
    "replicate, 25 MiB": {"style": "replicate"},
    "replicate, 2 MiB": {"style": "replicate", "bucket_mb": 2},
    "fully_shard, 2 MiB": {"style": "fully_shard", "bucket_mb": 2},
}
PEERS = {  # of the compiled case: name, key, target
    "replicate, 25 MiB": [("DDP", "ddp", "<= 0.85x"), ("DDP, torch.compile", "ddp compiled", "<= 1.00x")],
    "replicate, 2 MiB": [("DDP", "ddp", "<= 0.85x")],
    "fully_shard, 2 MiB": [("FSDP2 per block", "fsdp2", "<= 0.65x")],
}


def ddp_compiled(batch: Any) -> eager.Run:
    model: Any = torch.compile(torch.nn.parallel.DistributedDataParallel(eager.gpt()))
    return partial(eager.models.token_step, model, eager.adamw(model), batch)


def measure(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """One rank's part; rank 0 reports."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder + "/inductor"  # a first call is one without earlier runs' kernels
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(folder + "/store", eager.WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=eager.WORLD, store=store)
    mesh = init_device_mesh("cpu", (eager.WORLD,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(rank)
    (batch,) = eager.models.tokens(generator, rows=4, vocabulary=512, length=64)
    runs: dict[str, eager.Run] = {
        "ddp": eager.ddp(batch), "ddp compiled": ddp_compiled(batch), "fsdp2": eager.fsdp2(mesh, batch)
    }  # fmt: skip
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
    for case, peers in PEERS.items():
        own, plain = seconds[f"{case} inductor"], seconds[f"{case} eager"]
        for peer, key, target in peers:
            rows.append(eager.compared(f"{case}, inductor", target, own, peer, seconds[key]))
        rows.append(eager.compared(f"{case}, inductor against eager", "< 1.00x", own, "eager backend", plain))
        pairs = list(zip(facts["losses"][f"{case} inductor"], facts["losses"][f"{case} eager"], strict=True))
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        what = f"losses of {len(pairs)} steps, {case}"
        rows.append(eager.row(what, "within 1e-4", f"{worst:.1e} apart", "eager backend"))
        first, eagerly = facts["first"][f"{case} inductor"], facts["first"][f"{case} eager"]
        what = f"first call, {case}, {facts['pieces'][f'{case} inductor']} compiled parts"
        rows.append(eager.row(what, "-", f"{first:.1f} s", f"eager backend: {eagerly:.1f} s"))
    return rows


def main() -> int:
    options = eager.options_of(__doc__)
    title = f"Steps compiled by inductor on {eager.WORLD} ranks: GPT of 4 layers, width 192, fused AdamW, gloo"
    rows = rows_of(eager.on_ranks(measure, options.rounds, timeout=1200))
    return eager.write_rows(title, __file__, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
