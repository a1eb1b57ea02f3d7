"""Checks that need a GPU: a pytest file that runs from the source tree, with nothing installed.

    export PYTHONPATH=$(ls -d $PWD/tools/ranktest/src $PWD/packages/*/src | paste -sd:) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
    export OMP_NUM_THREADS=1 OUT=FOLDER
    python3 -m pytest -v -p ranktest.plugin -c tools/ranktest/pyproject.toml tools/gpu_check.py --ranks-device cuda

Without `--ranks-device` it runs on the CPU, small; `-k packing` and so on choose. Needs torch >= 2.11 and pytest. Each
test has processes of its own (ranktest ends one that hangs); what was measured goes to `FOLDER/gpu_check.jsonl`, a line
each. Tests of two ranks need two GPUs, or one and NCCL 2.30: `LD_PRELOAD=libnccl.so.2` of it, with `--ranks-per-gpu 2
--ranks-backend cpu:gloo,cuda:nccl`.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")  # a prototype, the compiler, and steps that run eagerly
MOVES = (("8: S(0)", "8: S(1)"), ("8: S(1)", "8: S(0)"), ("2x4: S(0), S(1)", "2x4: S(1), S(0)"))


def write_row(**row: Any) -> None:
    """Keep what was measured."""
    with open(Path(os.environ.get("OUT", ".")) / "gpu_check.jsonl", "a") as file:
        file.write(json.dumps(row, default=str) + "\n")


@contextmanager
def no_host_waits(device: torch.device) -> Iterator[None]:
    """Make torch raise where the host would wait for the device."""
    switch: Any = torch.cuda.set_sync_debug_mode if device.type == "cuda" else lambda mode: None
    synchronize(device)
    switch("error")
    try:
        yield
    finally:
        switch("default")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the median of several, after two that do not count."""
    times = []
    for _ in range(22 if device.type == "cuda" else 4):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]


@pytest.mark.ranks(1)
def test_environment(ranks: Ranks) -> None:
    """Versions and the device, and every collective under NCCL with one rank: right values, no wait for the device."""
    row: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        row |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        nccl = ctypes.c_int()  # of the library that is loaded; torch names the one that it was built with
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
        row |= {"devices": torch.cuda.device_count(), "nccl": nccl.value}
    write_row(**row)
    x = torch.arange(1024, dtype=torch.float32, device=ranks.device)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(out.copy_(x)),
        "broadcast": lambda: dist.broadcast(out.copy_(x), src=0),
        "all_gather": lambda: dist.all_gather([out], x),
        "reduce_scatter": lambda: dist.reduce_scatter(out, [x]),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x, [1024], [1024]),
    }
    for name, call in calls.items():
        call()
        out.fill_(-1)
        with no_host_waits(ranks.device):
            call()
        assert torch.equal(out, x), name


def reshard_program(device: torch.device, later: bool = False) -> Callable[[], object]:
    from shard_reshard import Resharder, plan_reshard, reshard

    x = torch.ones(64, 96, device=device)
    if later:
        return lambda: reshard(x, "1: S(0)", "1: S(1)", shape=(64, 96), async_op=True).wait()
    resharder = Resharder(plan_reshard((64, 96), torch.float32, "1: S(0)", "1: S(1)"))
    return lambda: resharder(x)


def styled(model: nn.Module, mesh: DeviceMesh, bridged: bool) -> nn.Module:
    from tp_ddp_bridge import wrap_ddp
    from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

    apply_plan(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return wrap_ddp(model, mesh=mesh) if bridged else model


def styles_program(device: torch.device, bridged: bool = False) -> Callable[[], object]:
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "tp"))
    model = styled(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device), mesh, bridged)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return partial(mean_square, model, optimizer, torch.ones(8, 32, device=device))


def blocks(width: int, count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count)]


def train_step(device: torch.device, style: Any, way: str = "graph") -> partial[torch.Tensor]:
    """A train step with its arguments: dp-partition's graph, eager or of a model under `torch.compile`, or torch's."""
    import dp_partition

    width, layers, rows = (2048, 8, 4096) if device.type == "cuda" else (32, 2, 8)
    torch.manual_seed(0)  # the same weights and rows each time
    model: nn.Module = nn.Sequential(*blocks(width, layers)).to(device)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    if way == "torch" and style == "replicate":
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "torch":
        for block in (*model.children(), model):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=device.type == "cuda")

    step: Any = mean_square
    if way != "torch":
        door: Any = dp_partition.compile if way == "graph" else dp_partition.distribute
        step = door(mean_square, mesh=mesh, style=style, check="first")
    called: Any = torch.compile(model) if way == "compiled" else model
    return partial(step, called, optimizer, torch.randn(rows, width, device=device))


PROGRAMS: dict[str, Callable[..., Callable[[], object]]] = {
    "shard-reshard": reshard_program,
    "shard-reshard-async": partial(reshard_program, later=True),
    "tp-styles": styles_program,
    "tp-ddp-bridge": partial(styles_program, bridged=True),
}
for style in ("replicate", "fully_shard"):
    PROGRAMS |= {f"dp-partition-{style}-{way}": partial(train_step, style=style, way=way) for way in ("graph", "eager")}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_wait_for_the_device_after_the_first_calls(ranks: Ranks, name: str) -> None:
    call = PROGRAMS[name](ranks.device)
    for _ in range(3):  # an eager step in shards is compared three times
        call()
    with no_host_waits(ranks.device):
        for _ in range(3):
            call()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_ways(ranks: Ranks, style: str) -> None:
    """dp-partition's ways beside DDP or FSDP2: five steps compared, then the ratios of times, taken in turns."""
    ways = ("torch", "graph", "eager", "compiled")
    steps = {way: train_step(ranks.device, style, way) for way in ways}
    losses = {way: [step().item() for _ in range(5)] for way, step in steps.items()}
    times = {way: [timed(step, ranks.device) for _ in range(4)] for way, step in steps.items()}
    ratios = {way: sorted(own / base for own, base in zip(times[way], times["torch"], strict=True)) for way in ways}
    error = max(abs(a - b) for way in ways for a, b in zip(losses[way], losses["torch"], strict=True))
    write_row(what=style, torch_ms=1e3 * times["torch"][0], ratios=ratios, compared=15, largest_difference=error)
    assert error <= 1e-4


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("move", MOVES)
def test_packing(ranks: Ranks, dtype: torch.dtype, move: tuple[str, str]) -> None:
    """shard-reshard's packing and unpacking against a copy of the same bytes."""
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering import build_program

    # Launches of fewer bytes take as long as their copies on an H200.
    device, side = ranks.device, 65536 if ranks.device.type == "cuda" else 64
    plan = plan_reshard((side, side), dtype, *move)
    exchange = Exchange(build_program((plan,), 3, 8))  # rank 3's shard; nothing is sent
    sources = [torch.ones(local, dtype=dtype, device=device) for local in plan.src.local_shapes(3)]

    def call(outs: Any = None) -> None:
        outs = exchange.allocate(device) if outs is None else outs
        exchange.prepare(sources, outs, device).run(lambda *_: None, False)

    outs, copied = exchange.allocate(device), 0
    for memory in exchange.memories(sources, outs)[0]:
        copied += sum(side.num_bytes for side in (memory.sends, memory.receives) if side.span is None)
        copied += sum(math.prod(source.sizes) * plan.itemsize for source, *_ in memory.own)
    plain = torch.ones(max(copied // 4, 1), device=device)
    ratio = timed(partial(torch.empty_like(plain).copy_, plain), device) / timed(partial(call, outs), device)
    del outs, plain
    peak = 0.0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = (torch.cuda.max_memory_allocated() - before) / plan.peak_bytes(3)
    write_row(what=f"{dtype} {move}", copied_bytes=copied, promised=plan.peak_bytes(3), speed=ratio, peak=peak)
    assert plan.peak_bytes(3) > 0
    if device.type == "cuda":
        assert ratio >= 0.85 or not copied, "slower than 0.85 of a plain copy"
        assert peak <= 1.02, "more memory than was promised"


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(*blocks(8, 3)),
    "recurrent": lambda: nn.GRU(8, 8, batch_first=True),  # cuDNN would keep gathered weights in memory of its own
}


def follows_one_process(ranks: Ranks, model: nn.Module, parallel: nn.Module, train: Any, rows: slice) -> None:
    """Train ``parallel`` by ``train`` on this rank's rows beside ``model`` on all; losses are compared with a mean."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, parallel)]
    for call in range(6):
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(call), dtype=torch.float64).to(ranks.device)
        want = mean_square(model, optimizers[0], x)
        with no_host_waits(ranks.device) if call == 5 else nullcontext():
            got = train(parallel, optimizers[1], x[rows]).detach().clone()
        dist.all_reduce(got)
        assert torch.allclose(got / ranks.world_size, want, rtol=1e-9), call


def mean_square(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    loss: torch.Tensor = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", ["distribute", "compile"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("name", MODELS)
def test_two_data_parallel_ranks(ranks: Ranks, name: str, style: Any, door: str) -> None:
    import dp_partition

    torch.manual_seed(0)
    model = MODELS[name]().to(ranks.device, torch.float64)
    other, mesh = copy.deepcopy(model), ranks.mesh((2,), ("dp",))
    step = getattr(dp_partition, door)(mean_square, mesh=mesh, style=style, check="first")
    follows_one_process(ranks, model, other, step, slice(2 * ranks.rank, 2 * ranks.rank + 2))
    step.release()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, another, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bridged", [False, True])
def test_two_tensor_parallel_ranks(ranks: Ranks, bridged: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(ranks.device, torch.float64)
    parallel = styled(copy.deepcopy(model), ranks.mesh((1, 2), ("dp", "tp")), bridged)
    follows_one_process(ranks, model, parallel, mean_square, slice(0, 4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_two_ranks_reshard(ranks: Ranks, dtype: torch.dtype) -> None:
    from shard_reshard import reshard

    full = torch.arange(48 * 64, device=ranks.device).view(48, 64).to(dtype)
    parts = {"2: R": full, "2: S(0)": full.chunk(2)[ranks.rank], "2: S(1)": full.chunk(2, 1)[ranks.rank]}
    for source, held in parts.items():
        for target, wanted in parts.items():
            assert torch.equal(reshard(held, source, target, shape=(48, 64)), wanted), (source, target)
    summed = reshard(full, "2: P", "2: S(1)", shape=(48, 64))
    assert torch.equal(summed, parts["2: S(1)"] + parts["2: S(1)"])
