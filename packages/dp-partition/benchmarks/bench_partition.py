"""dp-partition against DistributedDataParallel, FSDP2 and the floor; plans for 1,024 ranks; what tracing costs.

    python packages/dp-partition/benchmarks/bench_partition.py [--json FILE] [--rounds 40]

All steps of a comparison run in one process for each rank, one after the other in an order that is shuffled in every
round. The floor is the same step without communication, plus the step's collectives timed alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import dp_models as models
import dp_partition as dp
from dp_partition.api import runner_of

WORLD = 2
SHARDED = (0.5, 1, 2, "once")
MB = 1 << 20


class GPT(models.GPT):
    """The tests' GPT, with more layers."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary=vocabulary, length=length, width=width, heads=max(width // 64, 1))
        self.blocks = nn.ModuleList(models.Block(width, max(width // 64, 1)) for _ in range(layers))


def gpt(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=4, width=192, vocabulary=512, length=64).to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


Run = Callable[[], Any]


# ---- steps that are compared ----------------------------------------------------------------------------------------


def ours(mesh: Any, batch: Any, door: Any = dp.compile, **settings: Any) -> Run:
    model = gpt()
    return partial(door(models.token_step, mesh=mesh, **settings), model, adamw(model), batch)


def ddp(batch: Any) -> Run:
    model = nn.parallel.DistributedDataParallel(gpt())
    return partial(models.token_step, model, adamw(model), batch)


def fsdp2(mesh: Any, batch: Any, **settings: Any) -> Run:
    model: Any = gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return partial(models.token_step, model, adamw(model), batch)


def alone(batch: Any) -> Run:
    model = gpt()
    return partial(models.token_step, model, adamw(model), batch)


def alone_on_shards(batch: Any) -> Run:
    """Forward and backward on whole parameters, the update on half of each."""
    model = gpt()
    halves = [nn.Parameter(p.detach().chunk(WORLD)[0].clone()) for p in model.parameters()]
    optim = torch.optim.AdamW(halves, lr=1e-3, fused=True)

    def step() -> None:
        ids, targets = batch
        loss: Any = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        for half, param in zip(halves, model.parameters(), strict=True):
            half.grad = None if param.grad is None else param.grad.chunk(WORLD)[0]
        optim.step()
        model.zero_grad()

    return step


def collectives(events: list[tuple[str, int]]) -> Run:
    """The same collectives with nothing around them: kind and elements of the whole tensor."""
    buffers = [(kind, torch.ones(numel), torch.ones(numel // WORLD)) for kind, numel in events]
    received = torch.ones(max(numel for _, numel in events))

    def step() -> None:
        for kind, full, part in buffers:
            if kind == "all_reduce":
                dist.all_reduce(full)
            elif kind == "all_gather":
                dist.all_gather_into_tensor(full, part)
            else:  # as a step on gloo sends it
                dist.all_to_all_single(received[: full.numel()], full)

    return step


def events_of(step: dp.CompiledStep) -> list[tuple[str, int]]:
    from dp_partition.analysis import messages_of

    return [(m.kind, m.whole_bytes // 4 // WORLD * WORLD) for m in messages_of(step.graph.graph, WORLD)]


# ---- measuring ------------------------------------------------------------------------------------------------------


def interleaved(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step; the order is shuffled alike on all ranks."""
    dice = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 3):
        names = list(runs)
        dice.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            runs[name]()
            elapsed = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if number >= 3:
                seconds[name].append(elapsed.item())
    return seconds


def peak_bytes(run: Run) -> int:
    """Most bytes on top of what lives between steps."""
    return min(peak for peak, _ in (memory_of(run) for _ in range(2)))


def memory_of(run: Run) -> tuple[int, int]:
    """Most bytes during a call, and bytes left after it, on top of those before; as the profiler sees the allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
        gc.collect()
    profiler: Any = trace.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def measure(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """One rank's part; rank 0 reports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(folder + "/store", WORLD))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    (batch,) = models.tokens(torch.Generator().manual_seed(rank), rows=4, vocabulary=512, length=64)
    runs: dict[str, Run] = {"ddp": ddp(batch), "fsdp2": fsdp2(mesh, batch)}
    for mb in (25, 2, 1, 0.5):
        if mb != 1:
            runs[f"replicate {mb}"] = ours(mesh, batch, style="replicate", bucket_mb=mb)
        runs[f"fully_shard {mb}"] = ours(mesh, batch, style="fully_shard", bucket_mb=mb, reshard_after_forward=True)
    runs["fully_shard once"] = ours(mesh, batch, style="fully_shard", bucket_mb=2, reshard_after_forward=False)
    for run in runs.values():
        run()
    runs["compute, replicate"], runs["compute, fully_shard"] = alone(batch), alone_on_shards(batch)
    for style in ("replicate 25", "fully_shard once"):
        step: Any = runs[style]
        runs[f"collectives, {style}"] = collectives(events_of(step.func))
    seconds = interleaved(runs, rounds)
    peaks = {
        name: peak_bytes(runs[name])
        for name in ("ddp", "fsdp2", "replicate 25", *(f"fully_shard {how}" for how in SHARDED))
    }
    step = runs["fully_shard 2"]
    from dp_partition.analysis import live_memory

    memory = live_memory(step.func.graph.graph)
    model, optim = step.args[0], step.args[1]
    states = [s for state in optim.state.values() for s in state.values() if s.ndim]
    facts = {
        "seconds": seconds,
        "peaks": peaks,
        "gradients": sum(param.nbytes for param in gpt().parameters()),
        "predicted": memory.peak_bytes - memory.resident_bytes,
        "resident": memory.resident_bytes,
        "state": sum(s.to_local().numel() for s in states),
        "whole state": 2 * sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        queue.put(facts)
    dist.barrier()
    dist.destroy_process_group()


def small_modules() -> nn.Module:
    """Ten blocks of 30 layers each."""
    torch.manual_seed(0)
    block = [nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(30))) for _ in range(10)]
    return nn.Sequential(*block)


def wrapped(model: Any, modules: Any, mesh: Any) -> nn.Module:
    for module in modules:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def measure_small(rank: int, folder: str, rounds: int, queue: Any) -> None:
    """300 small modules, and what the check costs; rank 0 reports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(folder + "/store", WORLD))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    model: Any = small_modules()
    each = wrapped(model, [layer for block in model for layer in block], mesh)
    model = small_modules()
    blocks = wrapped(model, list(model), mesh)
    model = small_modules()
    runs: dict[str, Run] = {
        "each": partial(models.mean_step, each, adamw(each), x),
        "blocks": partial(models.mean_step, blocks, adamw(blocks), x),
        "ours": partial(dp.compile(models.mean_step, mesh=mesh, style="fully_shard"), model, adamw(model), x),
    }
    for run in runs.values():
        run()
    seconds = interleaved(runs, rounds)
    (batch,) = models.tokens(torch.Generator().manual_seed(rank), rows=4, vocabulary=512, length=64)
    never = ours(mesh, batch, style="fully_shard", bucket_mb=2, check="never")
    sampled: Any = ours(mesh, batch, style="fully_shard", bucket_mb=2)
    schedule = runner_of(sampled.func).schedule

    def checked() -> None:
        schedule.next = schedule.calls + 1
        sampled()
        schedule.next = 0

    def between() -> None:
        sampled()

    for run in (never, checked, checked, between):
        run()
    seconds |= interleaved({"never": never, "checked": checked, "between": between}, max(rounds // 2, 5))
    memory = {"never": memory_of(never), "checked": memory_of(checked), "between": memory_of(between)}
    if rank == 0:
        queue.put({"seconds": seconds, "memory": memory})
    dist.barrier()
    dist.destroy_process_group()


def rows_of_small(facts: dict[str, Any]) -> list[dict[str, str]]:
    seconds, memory = facts["seconds"], facts["memory"]
    what = "300 small modules, fully_shard"
    rows = [
        compared(what, "< 1.00x", seconds["ours"], "FSDP2 per module", seconds["each"]),
        compared(what, "< 1.00x", seconds["ours"], "FSDP2 per block of 30", seconds["blocks"]),
        compared("a checked call, fully_shard, 2 MiB", "-", seconds["checked"], "check='never'", seconds["never"]),
        compared("a call between checks", "1.00x", seconds["between"], "check='never'", seconds["never"]),
    ]
    for name in ("checked", "between"):
        (peak, remaining), (other, _) = memory[name], memory["never"]
        measured = f"{(peak - other) / MB:+.1f} MiB at the peak, {remaining / MB:.1f} MiB left after it"
        target = "-" if name == "checked" else "0, 0"
        rows.append(row(f"memory of a call, {name}", target, measured, f"check='never': {other / MB:.1f} MiB"))
    return rows


def on_ranks(measure: Callable[..., None], rounds: int, timeout: float = 600) -> Any:
    """What rank 0 of `WORLD` puts into the queue of ``measure(rank, folder, rounds, queue)``."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [context.Process(target=measure, args=(rank, folder, rounds, queue)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        result = queue.get(timeout=timeout)
        for process in ranks:
            process.join()
    return result


def plan_for_1024(queue: Any) -> None:
    """A GPT of a billion parameters on 1,024 ranks, from meta tensors."""
    with torch.device("meta"):
        model = GPT(layers=18, width=2048, vocabulary=50304, length=1024)
        ids = torch.zeros(1, 1024, dtype=torch.long)
    before = time.perf_counter()
    cost = dp.estimate(models.token_step, model, adamw(model), (ids, ids), world=1024, style="fully_shard")
    elapsed = time.perf_counter() - before
    closed = sum(-(-p.info.shape[0] // 1024) * (p.info.num_bytes // p.info.shape[0]) * 1023 for p in cost.plan.params)
    exact = cost.sent_bytes("reduce_scatter") == closed
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    queue.put((sum(p.numel() for p in model.parameters()), elapsed, memory, exact))


def compile_overhead(queue: Any) -> None:
    """First call on one rank, less a later one, after the process has traced something else."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    overheads, eager = [], []
    for attempt in range(4):
        torch.manual_seed(0)
        model = GPT(layers=2, width=64, vocabulary=64, length=16)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        (batch,) = models.tokens(torch.Generator(), rows=2, vocabulary=64, length=16)
        step = dp.compile(models.token_step, mesh=mesh, style="fully_shard")
        start = time.perf_counter()
        step(model, optim, batch)
        first = time.perf_counter() - start
        start = time.perf_counter()
        step(model, optim, batch)
        later = time.perf_counter() - start
        step.release()
        start = time.perf_counter()
        models.token_step(model, optim, batch)
        eager.append(time.perf_counter() - start)
        if attempt:
            overheads.append(first - later)
    queue.put((overheads, min(eager)))
    dist.destroy_process_group()


def in_child(function: Callable[[Any], None]) -> Any:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=function, args=(queue,))
    process.start()
    result = queue.get(timeout=600)
    process.join()
    return result


# ---- rows -----------------------------------------------------------------------------------------------------------


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms (min {min(seconds) * 1e3:.1f})"


def row(what: str, target: str, measured: str, peer: str) -> dict[str, str]:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def compared(what: str, target: str, own: list[float], peer_name: str, peer: list[float]) -> dict[str, str]:
    times = statistics.median(own) / statistics.median(peer)
    best = min(own) / min(peer)
    return row(what, target, f"{times:.2f}x (min {best:.2f}x): {ms(own)}", f"{peer_name}: {ms(peer)}")


def rows_of(facts: dict[str, Any]) -> list[dict[str, str]]:
    seconds, peaks = facts["seconds"], facts["peaks"]
    rows = []
    for mb in (25, 2, 0.5):
        own = seconds[f"replicate {mb}"]
        rows.append(compared(f"replicate, buckets of {mb} MiB", "<= 1.00x", own, "DDP", seconds["ddp"]))
    for mb in (25, 2, 1, 0.5):
        own = seconds[f"fully_shard {mb}"]
        rows.append(compared(f"fully_shard, reshard, {mb} MiB", "<= 0.65x", own, "FSDP2 per block", seconds["fsdp2"]))
    for how, name in (("gathered once", "once"),):
        own = seconds[f"fully_shard {name}"]
        rows.append(compared(f"fully_shard, {how}, 2 MiB", "<= 0.65x", own, "FSDP2 per block", seconds["fsdp2"]))
    for style, compute in (("replicate 25", "compute, replicate"), ("fully_shard once", "compute, fully_shard")):
        floor = [a + b for a, b in zip(seconds[compute], seconds[f"collectives, {style}"], strict=True)]
        rows.append(compared(f"{style} against the floor", "<= 1.15x", seconds[style], "compute + collectives", floor))
    sharded = [(f"fully_shard {how}", "fsdp2") for how in SHARDED]
    for name, peer in (("replicate 25", "ddp"), *sharded):
        measured = f"{peaks[name] / MB:.1f} MiB on top of what lives between steps"
        other = f"{peer}: {peaks[peer] / MB:.1f} MiB"
        if peer == "ddp":  # ours are made in the step
            other += f", and {facts['gradients'] / MB:.1f} MiB of buckets that it keeps between steps"
        rows.append(row(f"peak memory, {name}", "<= the peer's", measured, other))
    for how in SHARDED:
        name = f"fully_shard {how}"
        ratios = peaks[name] / peaks["fsdp2"], statistics.median(seconds[name]) / statistics.median(seconds["fsdp2"])
        measured = f"{ratios[0]:.2f}x of the peak at {ratios[1]:.2f}x of the time"
        rows.append(row(f"peak and time, {name}", "<= 1.00x (aim 0.86x) at <= 0.75x", measured, "fsdp2 per block: 1"))
    peak = peaks["fully_shard 2"] + facts["resident"]
    off = (facts["predicted"] + facts["resident"]) / peak - 1
    rows.append(row("predicted peak against measured", "within 5 %", f"{off:+.1%}", f"profiler: {peak / MB:.1f} MiB"))
    part = facts["state"] / facts["whole state"]
    rows.append(row("optimizer state per rank", "1/2, padding <= 1 %", f"{part:.4f}", "replicated: 1"))
    return rows


def write_rows(title: str, script: str, rows: list[dict[str, str]], file: Path | None) -> int:
    """Print a benchmark's rows, and write them where `tools/bench.py` reads them."""
    command = f"python packages/dp-partition/benchmarks/{Path(script).name}"
    if file:
        file.write_text(json.dumps({"title": title, "command": command, "rows": rows}))
    for one in rows:
        print(f"{one['what']:52} {one['target']:30} {one['measured']:48} {one['peer']}")
    return 0


def options_of(text: str | None) -> argparse.Namespace:
    """The options that each of these scripts takes; ``text`` is its docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    return parser.parse_args()


def main() -> int:
    options = options_of(__doc__)
    rows = rows_of(on_ranks(measure, options.rounds)) + rows_of_small(on_ranks(measure_small, options.rounds))
    numel, elapsed, memory, exact = in_child(plan_for_1024)
    rows.append(
        row(
            f"plan of {numel / 1e9:.2f} B parameters for world 1024",
            "< 60 s, < 4 GiB, bytes exact",
            f"{elapsed:.0f} s, {memory / (1 << 30):.1f} GiB, gradient bytes {'exact' if exact else 'WRONG'}",
            "closed form",
        )
    )
    overhead, eager = in_child(compile_overhead)
    rows.append(
        row("compile overhead, GPT of 2 layers, AdamW", "< 2 s", ms(overhead), f"one eager step: {ms([eager])}")
    )
    title = f"Steps on {WORLD} ranks: GPT of 4 layers, width 192, fused AdamW, gloo, one thread a rank"
    return write_rows(title, __file__, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
