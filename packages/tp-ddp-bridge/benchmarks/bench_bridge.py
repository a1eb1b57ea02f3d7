"""CPU time and collectives of a step with the bridge, beside its peers, on gloo.

    python packages/tp-ddp-bridge/benchmarks/bench_bridge.py [--json FILE] [--repeats 15] [--sizes 36 100 772]

The model is a stack of blocks of four parameter tensors (column, row), made tensor parallel by torch. One step is
zero_grad, forward, backward and the gradients' reduction over the data axis; the optimizer is timed on its own, because
it is faster on local tensors than on DTensors and would hide the bridge's cost. The variants take turns within one run,
so that a busy machine slows all of them alike, and CPU time (`process_time`, all threads) is taken, not the clock.

- by hand: DTensor parameters, gradients flattened into buckets of 25 MB, one all_reduce each, copied back;
- bridge: `wrap_ddp`;
- torch: `DDP(device_mesh=...)`, with torch's own transform, which keeps the DTensors of its first forward;
- replicate: `torch.distributed._composable.replicate` over the bridge's leaves, where it takes them;
- FSDP2: `fully_shard` per block over the data axis.
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
from torch import nn

RANKS = 4
WIDTH = 64
BATCH = 8
TARGETS = {36: "-", 100: "<= 1.03x", 772: "<= 1.03x"}


def main(argv: list[str] | None = None) -> None:
    """Run on four ranks, print measured against target, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="*", default=[36, 100, 772])
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=_rank, args=(rank, folder, arguments.sizes, arguments.repeats, results))
            for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        rows = results.get()
        for worker in workers:
            worker.join()
    width = max(len(row["what"]) for row in rows)
    for row in rows:
        print(f"{row['what']:<{width}}  measured {row['measured']}  target {row['target']}  peer {row['peer']}")
    if arguments.json:
        command = "python packages/tp-ddp-bridge/benchmarks/bench_bridge.py"
        data = {"title": "tp-ddp-bridge: DDP around tensor parallelism", "command": command, "rows": rows}
        Path(arguments.json).write_text(json.dumps(data, indent=1))


def _row(what: str, target: str, measured: str, peer: str) -> dict[str, str]:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def _rank(rank: int, folder: str, sizes: list[int], repeats: int, results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = []
    for size in sizes:
        rows += _steps(mesh, size, max(5, repeats if size < 500 else repeats // 3))
    rows += _collectives(mesh, 100)
    rows += _optimizer_steps(mesh, 100, repeats)
    rows += _clipping(mesh, 100, repeats)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


# ---- models ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two layers with biases: four parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, width]`` in and out."""
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def _model(mesh: Any, tensors: int) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(tensors // 4)))
    return parallelize_module(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})


def _by_hand(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    model = _model(mesh, tensors)
    group = mesh["dp"].get_group()
    parameters = list(model.parameters())

    def reduce() -> None:
        grads = [parameter.grad.to_local() for parameter in parameters]
        bucket: list[torch.Tensor] = []
        size = 0
        for grad in [*grads, None]:
            if grad is None or size + grad.numel() * 4 > 25 << 20:
                flat = torch.cat([each.flatten() for each in bucket])
                dist.all_reduce(flat, group=group)
                flat /= 2
                for each, reduced in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    each.copy_(reduced.view_as(each))
                bucket, size = [], 0
            if grad is not None:
                bucket.append(grad)
                size += grad.numel() * 4

    return model, reduce


def _bridge(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    from tp_ddp_bridge import wrap_ddp

    return wrap_ddp(_model(mesh, tensors), mesh=mesh), _nothing


def _torch_bridge(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(_model(mesh, tensors), device_mesh=mesh["dp"]), _nothing


def _replicate(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    from torch.distributed._composable import replicate
    from tp_ddp_bridge import pre_dp_module_transform

    model = pre_dp_module_transform(_model(mesh, tensors))
    return replicate(model, process_group=mesh["dp"].get_group()), _nothing


def _fsdp2(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    from torch.distributed.fsdp import fully_shard

    model = _model(mesh, tensors)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), _nothing


def _nothing() -> None:
    pass


# ---- rows -----------------------------------------------------------------------------------------------------


def _interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each call, summed over the ranks. The calls of a repeat follow each other in turning order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(3):
        for call in calls.values():
            call()
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            dist.barrier()
            begin = time.process_time()
            calls[name]()
            spent = torch.tensor(time.process_time() - begin)
            dist.all_reduce(spent)
            times[name].append(float(spent))
    return times


def _ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds) / RANKS:.1f} ms"


def _steps(mesh: Any, tensors: int, repeats: int) -> list[dict[str, str]]:
    makers = {"hand": _by_hand, "bridge": _bridge, "torch": _torch_bridge, "replicate": _replicate, "fsdp2": _fsdp2}
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    calls, refused = {}, {}
    for name, make in makers.items():
        try:
            calls[name] = _step(*make(mesh, tensors), x)
        except Exception as error:  # a peer that cannot do it is a result, too
            refused[name] = type(error).__name__
    times = _interleaved(calls, repeats)
    rows = [
        _row(
            f"{tensors} tensors: CPU time per step, bridge / by hand",
            TARGETS.get(tensors, "-"),
            f"{_ratio(times, 'bridge', 'hand'):.2f}x",
            f"by hand {_ms(times['hand'])}, bridge {_ms(times['bridge'])} a rank",
        )
    ]
    for name in ("torch", "replicate", "fsdp2"):
        measured = f"{_ratio(times, name, 'hand'):.2f}x" if name in times else f"refused ({refused[name]})"
        peer = _ms(times[name]) + " a rank" if name in times else refused[name]
        rows.append(_row(f"{tensors} tensors: CPU time per step, {name} / by hand", "-", measured, peer))
    return rows


def _step(model: Any, reduce: Callable[[], None], x: torch.Tensor) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(model(x).pow(2).mean())
        reduce()

    return step


def _plain_ddp(mesh: Any, tensors: int) -> tuple[Any, Callable[[], None]]:
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(*(Block() for _ in range(tensors // 4)))
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group()), _nothing


def _collectives(mesh: Any, tensors: int) -> list[dict[str, str]]:
    """All-reduces of a step as the profiler counts them. Those of tensor parallelism are in `by hand` too."""
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(BATCH, WIDTH)
    counts = {}
    for name, make in {"bridge": _bridge, "hand": _by_hand, "plain": _plain_ddp}.items():
        step = _step(*make(mesh, tensors), x)
        for _ in range(3):  # DDP arranges its buckets anew after the first
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
        counts[name] = sum(event.count for event in profiled.key_averages() if event.key == "c10d::allreduce_")
    data = counts["bridge"] - (counts["hand"] - 1)  # by hand sends one bucket
    return [
        _row(
            f"{tensors} tensors: all-reduces over the data axis per step",
            "as plain DDP",
            str(data),
            f"plain DDP {counts['plain']}, by hand 1; with tensor parallelism's {counts['bridge']}, "
            f"by hand {counts['hand']}",
        )
    ]


def _optimizer_steps(mesh: Any, tensors: int, repeats: int) -> list[dict[str, str]]:
    calls = {}
    for name, make in {"hand": _by_hand, "bridge": _bridge}.items():
        model, _ = make(mesh, tensors)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        calls[name] = optimizer.step
    times = _interleaved(calls, repeats)
    return [
        _row(
            f"{tensors} tensors: AdamW step on leaves / on DTensors",
            "-",
            f"{_ratio(times, 'bridge', 'hand'):.2f}x",
            f"DTensors {_ms(times['hand'])}, leaves {_ms(times['bridge'])} a rank",
        )
    ]


def _clipping(mesh: Any, tensors: int, repeats: int) -> list[dict[str, str]]:
    from tp_ddp_bridge import clip_grad_norm_

    models = {name: make(mesh, tensors)[0] for name, make in {"hand": _by_hand, "bridge": _bridge}.items()}
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: nn.utils.clip_grad_norm_(models["hand"].parameters(), 1.0),
        "bridge": lambda: clip_grad_norm_(models["bridge"].parameters(), 1.0),
    }
    times = _interleaved(calls, repeats)
    return [
        _row(
            f"{tensors} tensors: clip_grad_norm_, one scalar all_reduce, against torch's on DTensors",
            "1 all_reduce",
            f"1 all_reduce, {_ratio(times, 'bridge', 'torch'):.2f}x the time",
            f"torch {_ms(times['torch'])}, bridge {_ms(times['bridge'])} a rank",
        )
    ]


if __name__ == "__main__":
    main()
