"""dp-partition's eager way against DDP and FSDP2 put on by hand, also under `torch.compile`; many small modules.

    python packages/dp-partition/benchmarks/bench_eager.py [--json FILE] [--rounds 40]

All steps run in one process for each rank, one after the other in an order that is shuffled in every round. Losses of
five steps are compared with the peer's.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_partition as base
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

PEERS = {
    "ddp": "DDP", "fsdp2": "FSDP2 per block", "fsdp2, resharded": "FSDP2 per block, the root resharded too",
    "ddp, compiled": "DDP, torch.compile", "fsdp2, compiled": "FSDP2 per block, torch.compile",
}  # fmt: skip
ROWS = [  # of the page: name, key, peer, target
    ("replicate, eager", "replicate", "ddp", "<= 1.05x"),
    ("fully_shard, eager", "fully_shard", "fsdp2", "<= 1.08x"),
    ("fully_shard, eager", "fully_shard", "fsdp2, resharded", "<= 1.08x"),
    ("replicate, torch.compile", "replicate, compiled", "ddp, compiled", "<= 1.05x"),
    ("fully_shard, torch.compile", "fully_shard, compiled", "fsdp2, compiled", "<= 1.08x"),
    ("300 small modules, replicate, eager", "small, replicate, distribute", "small, ddp", "<= 1.05x"),
    ("300 small modules, replicate, graph", "small, replicate, compile", "small, ddp", "<= 1.11x"),
]


def small(step: Any, model: torch.nn.Module, x: torch.Tensor) -> base.Run:
    return partial(step, model, base.adamw(model), x)


def compiled(run: Any) -> base.Run:
    """The same step with the model compiled by torch."""
    model, *rest = run.args
    return partial(run.func, torch.compile(model), *rest)


def measure(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """One rank's part; rank 0 reports."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(folder + "/store", base.WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=base.WORLD, store=store)
    mesh = init_device_mesh("cpu", (base.WORLD,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(rank)
    (batch,) = base.models.tokens(generator, rows=4, vocabulary=512, length=64)
    x = torch.randn(8, 32, generator=generator)
    mean_step: Any = base.models.mean_step
    runs: dict[str, base.Run] = {
        "ddp": base.ddp(batch),
        "fsdp2": base.fsdp2(mesh, batch),
        "fsdp2, resharded": base.fsdp2(mesh, batch, reshard_after_forward=True),  # as `distribute` does, see `shard`
        "replicate": base.ours(mesh, batch, door=base.dp.distribute, style="replicate", check="first"),
        "fully_shard": base.ours(mesh, batch, door=base.dp.distribute, style="fully_shard", check="first"),
        "small, ddp": small(mean_step, torch.nn.parallel.DistributedDataParallel(base.small_modules()), x),
    }
    doors: dict[str, Any] = {"distribute": base.dp.distribute, "compile": base.dp.compile}
    for name, door in doors.items():
        step = door(mean_step, mesh=mesh, style="replicate", check="first")
        runs[f"small, replicate, {name}"] = small(step, base.small_modules(), x)
    for name in ("ddp", "fsdp2"):
        make: Any = {"ddp": base.ddp, "fsdp2": partial(base.fsdp2, mesh)}[name]
        runs[f"{name}, compiled"] = compiled(make(batch))
    for style in ("replicate", "fully_shard"):
        runs[f"{style}, compiled"] = compiled(base.ours(mesh, batch, base.dp.distribute, style=style, check="first"))
    losses = {name: [float(run()) for _ in range(5)] for name, run in runs.items()}
    seconds = base.interleaved(runs, rounds)
    if rank == 0:
        queue.put({"seconds": seconds, "losses": losses})
    dist.barrier()
    dist.destroy_process_group()


def rows_of(facts: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for what, key, peer, target in ROWS:
        label = PEERS.get(peer, "DDP")
        rows.append(base.compared(what, target, facts["seconds"][key], label, facts["seconds"][peer]))
        pairs = list(zip(facts["losses"][key], facts["losses"][peer], strict=True))
        worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
        rows.append(base.row(f"losses of {len(pairs)} steps, {what}", "within 1e-4", f"{worst:.1e} apart", label))
    return rows


def main() -> int:
    options = base.options_of(__doc__)
    title = f"Steps that run eagerly on {base.WORLD} ranks: GPT of 4 layers, width 192, fused AdamW, gloo"
    rows = rows_of(base.on_ranks(measure, options.rounds, timeout=1200))
    return base.write_rows(title, __file__, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
