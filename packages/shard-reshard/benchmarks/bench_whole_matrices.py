"""Optimizers on full matrices against their floor and their peers, interleaved in one run on four gloo ranks.

    python packages/shard-reshard/benchmarks/bench_whole_matrices.py [--json FILE] [--repeats 7]

Times are medians over repeats, in each of which every way takes a step. The floor is two raw `all_to_all_single` of the
same bytes and the update of the same matrices on their owners. Peers: `full_tensor()` of every gradient on every rank,
and torch's Muon on FSDP2's parameters as they are.
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
from shard_reshard import WholeMatrices, plan_owners
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

RANKS = 4
SHAPE, COUNT = (512, 1024), 12  # 24 MiB in float32


def main(argv: list[str] | None = None) -> None:
    """Run on four ranks, print measured against target, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=_rank, args=(rank, folder, arguments.repeats, results)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        rows = results.get()
        for worker in workers:
            worker.join()
    rows += _planning_rows()
    width = max(len(row["what"]) for row in rows)
    for row in rows:
        print(f"{row['what']:<{width}}  measured {row['measured']}  target {row['target']}  peer {row['peer']}")
    if arguments.json:
        command = "python packages/shard-reshard/benchmarks/bench_whole_matrices.py"
        data = {"title": "shard-reshard: optimizers on full matrices", "command": command, "rows": rows}
        Path(arguments.json).write_text(json.dumps(data, indent=1))


def _row(what: str, target: str, measured: str, peer: str) -> dict[str, str]:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _rank(rank: int, folder: str, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    full = {f"w{n}": torch.randn(SHAPE, generator=generator) for n in range(COUNT)}
    gradients = {name: torch.randn(SHAPE, generator=generator) for name in full}
    reference = {name: nn.Parameter(value.clone()) for name, value in full.items()}
    one = _muon(list(reference.values()))
    ways: dict[str, dict[str, nn.Parameter]] = {}
    for way in ("owners", "full_tensor", "as it is"):
        ways[way] = {
            name: nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)])) for name, value in full.items()
        }
        for name, parameter in ways[way].items():
            parameter.grad = distribute_tensor(gradients[name], mesh, [Shard(0)])
    for name, parameter in reference.items():
        parameter.grad = gradients[name]

    optimizer = WholeMatrices(ways["owners"], _muon)
    everywhere = {name: nn.Parameter(value.clone()) for name, value in full.items()}
    gathered, plain = _muon(list(everywhere.values())), _muon(ways["as it is"].values())

    def full_tensor() -> None:
        for name, parameter in ways["full_tensor"].items():
            gradient: Any = parameter.grad
            everywhere[name].grad = gradient.full_tensor()
        gathered.step()
        for name, parameter in ways["full_tensor"].items():
            local: Any = parameter.detach()
            local.to_local().copy_(everywhere[name].detach().chunk(RANKS)[rank])

    calls: dict[str, Callable[[], Any]] = {
        "owners": optimizer.step,
        "floor": _floor(optimizer, rank),
        "full_tensor": full_tensor,
        "as it is": plain.step,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    one.step()
    errors = {way: _error(parameters, reference, full) for way, parameters in ways.items()}
    for _ in range(repeats):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[name].append(float(taken))
    peaks = {name: _peak(calls[name]) / 2**20 for name in ("owners", "floor")}
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    total = sum(value.numel() * value.element_size() for value in full.values())
    if rank == 0:
        size, ours = f"{COUNT} matrices of {SHAPE[0]} x {SHAPE[1]}", f"{middle['owners'] * 1e3:.0f} ms"
        ratio = statistics.median(a / b for a, b in zip(times["owners"], times["floor"], strict=True))
        floor = f"two raw all-to-alls and the same updates {middle['floor'] * 1e3:.0f} ms; {_beside(total)}"
        rows = [_row(f"a step of Muon, {size}", "<= 1.15x the floor", f"{ours}, {ratio:.2f}x", floor)]
        ratio = statistics.median(b / a for a, b in zip(times["owners"], times["full_tensor"], strict=True))
        peer = f"full_tensor() on every rank {middle['full_tensor'] * 1e3:.0f} ms"
        rows.append(_row(f"a step of Muon, {size}", ">= 2.5x faster", f"{ours}, {ratio:.2f}x", peer))
        ratio = statistics.median(b / a for a, b in zip(times["owners"], times["as it is"], strict=True))
        peer = f"torch's Muon on FSDP2's shards {middle['as it is'] * 1e3:.0f} ms"
        rows.append(_row(f"a step of Muon, {size}", "faster", f"{ours}, {ratio:.2f}x", peer))
        sent, gathers = optimizer.plan.lower_bound, (RANKS - 1) * total
        rows.append(_row("bytes sent in a step", "the bound", f"{sent:,}", f"all-gather of all gradients {gathers:,}"))
        owned, bucket = max(optimizer.plan.owned_bytes) / 2**20, optimizer.plan.bucket_bytes / 2**20
        bound = f"<= {bucket + owned:.0f} MiB: a bucket and an owner's matrices"
        measured = f"{peaks['owners'] - peaks['floor']:.1f} MiB"
        peer = f"the update alone {peaks['floor']:.1f} MiB; the full model {total / 2**20:.0f} MiB"
        rows.append(_row("peak memory of a step beyond that of the update", bound, measured, peer))
        peer = f"torch's Muon on FSDP2's shards {errors['as it is']:.1e}, full_tensor() {errors['full_tensor']:.1e}"
        rows.append(_row("difference from one process / movement", "0", f"{errors['owners']:.1e}", peer))
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _beside(num_bytes: int) -> str:
    """Return what a rank of a step does beside the floor, for sharded matrices of so many bytes in all."""
    shards, own = num_bytes / RANKS / 2**20, 1 / RANKS
    copied = 2 * shards * (2 * (1 - own) + own)  # packed and unpacked in both directions; its own part is copied once
    sums = 2 * 3 * shards  # of rows, of columns, of numbers: after this step, and before the next one
    text = f"beside them a rank copies {copied:.0f} MiB, reads {sums:.0f} MiB of parameters to see writes through .data"
    return f"{text}, and waits for all ranks twice more"


def _peak(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that were alive at one time in a call, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        call()
    alive = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]  # there after the block
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def _floor(optimizer: WholeMatrices, rank: int) -> Callable[[], None]:
    """Return the floor: the plan's bytes in two all-to-alls, and the update of the matrices that this rank owns."""
    owned = [
        matrix for matrix, owner in zip(optimizer.plan.matrices, optimizer.plan.owners, strict=True) if owner == rank
    ]
    masters = [nn.Parameter(torch.randn(matrix.shape)) for matrix in owned]
    inner = _muon(masters) if masters else None
    share = SHAPE[0] * SHAPE[1] // RANKS
    to = [share * optimizer.plan.owners.count(peer) for peer in range(RANKS)]
    mine = [share * len(owned)] * RANKS
    shards, gathered = torch.randn(sum(to)), torch.empty(sum(mine))
    for parameter in masters:
        parameter.grad = torch.randn(parameter.shape)

    def step() -> None:
        dist.all_to_all_single(gathered, shards, mine, to)
        if inner is not None:
            inner.step()
        dist.all_to_all_single(shards, gathered, to, mine)

    return step


def _error(
    parameters: dict[str, nn.Parameter], reference: dict[str, nn.Parameter], start: dict[str, torch.Tensor]
) -> float:
    """Return the largest difference of a matrix from one process, relative to that one's movement."""
    errors = []
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        moved, expected = parameter.full_tensor().detach(), reference[name].detach()
        errors.append(float((moved - expected).norm() / (expected - start[name]).norm()))
    return max(errors)


def _planning_rows() -> list[dict[str, str]]:
    """Plan the matrices of a Llama of 70B parameters, in one process."""
    shapes: dict[str, tuple[int, int]] = {}
    for number in range(80):
        at = f"layers.{number}."
        shapes |= {at + "q": (8192, 8192), at + "k": (1024, 8192), at + "v": (1024, 8192), at + "o": (8192, 8192)}
        shapes |= {at + "gate": (28672, 8192), at + "up": (28672, 8192), at + "down": (8192, 28672)}
    total, rows = sum(m * n for m, n in shapes.values()) * 2, []
    for world, target in ((64, 0.5), (2048, 3.0)):
        mesh = f"fsdp={world // 8}, tp=8: fsdp:S(0)"
        layouts = {n: f"{mesh}, tp:S({int(n.endswith(('o', 'down')))})" for n in shapes}
        layouts = {n: text if text.endswith("S(1)") else f"{text}; order=tp>fsdp" for n, text in layouts.items()}
        start = time.process_time()  # of the CPU: another process on the machine does not count
        plan = plan_owners(shapes, world, layouts, dtype="bfloat16")
        taken = time.process_time() - start
        sent = plan.lower_bound / world / 2**30
        peer = f"sends {sent:.2f} GiB a rank; an all-gather of everything {(world - 1) * total / world / 2**30:.1f}"
        rows.append(
            _row(f"plan {len(shapes)} matrices on {world} ranks, CPU time", f"<= {target} s", f"{taken:.2f} s", peer)
        )
    return rows


if __name__ == "__main__":
    main()
