"""Checks that need a GPU: a pytest file that runs from the source tree, with nothing installed.

    export PYTHONPATH=$(ls -d $PWD/tools/ranktest/src $PWD/packages/*/src | paste -sd:) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
    export OMP_NUM_THREADS=1 OUT=FOLDER
    python3 -m pytest -v -p ranktest.plugin -c tools/ranktest/pyproject.toml tools/gpu_check.py --ranks-device cuda

Without `--ranks-device` it runs on the CPU, small, what can run there; `-k lowering` and so on choose. Needs torch >=
2.11 and pytest. Each test is a process of its own (ranktest ends one that hangs); what was measured goes to
`FOLDER/gpu_check.jsonl`, a line each. Several NCCL ranks on one GPU need NCCL 2.30 (`LD_PRELOAD` a newer
`libnccl.so.2`); without it the suites run over gloo on CUDA tensors alone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
RANKS_PER_GPU = 4
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
        row |= {"devices": torch.cuda.device_count(), "nccl": torch.cuda.nccl.version()}
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


def styles_program(device: torch.device, bridged: bool = False) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "tp"))
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    apply_plan(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if bridged:
        from tp_ddp_bridge import wrap_ddp

        model = wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(8, 32, device=device)

    def call() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def partitioned_step(device: torch.device, style: str, *, compiled: bool = False) -> partial[torch.Tensor]:
    """A train step made data-parallel, with its arguments; its model under `torch.compile` or not."""
    import dp_partition
    from torch.distributed.device_mesh import init_device_mesh

    width, layers, rows = (2048, 8, 4096) if device.type == "cuda" else (32, 2, 8)
    torch.manual_seed(0)  # the same weights and rows each time
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    optimizer: torch.optim.Optimizer
    if device.type == "cuda":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=True)
    else:  # on the CPU, AdamW's step count is a number in the graph, and every step compiles anew
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    kind = dp_partition.DataParallelStyle[style.upper()]
    step = dp_partition.compile(train, mesh=mesh, style=kind)
    return partial(
        step, torch.compile(model) if compiled else model, optimizer, torch.randn(rows, width, device=device)
    )


PROGRAMS: dict[str, Callable[[torch.device], Callable[[], object]]] = {
    "shard-reshard": reshard_program,
    "shard-reshard-async": partial(reshard_program, later=True),
    "tp-styles": styles_program,
    "tp-ddp-bridge": partial(styles_program, bridged=True),
    "dp-partition-replicate": lambda device: partitioned_step(device, "replicate"),
    "dp-partition-fully_shard": lambda device: partitioned_step(device, "fully_shard"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_wait_for_the_device_after_the_first_calls(ranks: Ranks, name: str) -> None:
    call = PROGRAMS[name](ranks.device)
    call()
    call()
    with no_host_waits(ranks.device):
        for _ in range(3):
            call()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled(ranks: Ranks, style: str) -> None:
    """dp-partition's graph, and the eager way of a model under `torch.compile`: five steps compared, and the times."""
    values: dict[str, list[torch.Tensor]] = {}
    row: dict[str, Any] = {"what": style}
    for way in ("graph", "compiled"):
        step = partitioned_step(ranks.device, style, compiled=way == "compiled")
        values[way] = [step().clone() for _ in range(5)]
        partitioned: Any = step.func
        with partitioned.unsharded():
            values[way] += [parameter.detach().clone() for parameter in step.args[0].parameters()]
        row[f"{way}_ms"] = round(1e3 * timed(step, ranks.device), 3)
    pairs = list(zip(values["graph"], values["compiled"], strict=True))
    error = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    write_row(**row, compared=len(pairs), largest_difference=error)
    assert len(pairs) > 5
    assert error <= 1e-4


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("move", MOVES)
def test_packing(ranks: Ranks, dtype: torch.dtype, move: tuple[str, str]) -> None:
    """shard-reshard's packing and unpacking against a copy of the same bytes."""
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering import build_program

    device, side = ranks.device, 32768 if ranks.device.type == "cuda" else 64
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


@pytest.fixture(scope="module", params=["cpu:gloo,cuda:nccl", "gloo"])
def suites(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All packages' `@ranks` tests at once on one GPU, a pytest each; on the CPU they are collected alone."""
    backend, is_cuda = request.param, request.config.getoption("ranks_device") == "cuda"
    if is_cuda and backend != "gloo" and tuple(torch.cuda.nccl.version())[:2] < (2, 30):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} refuses two ranks on one GPU, 2.30 does not")
    device = ["--ranks-device", "cuda", "--ranks-backend", backend, "--ranks-per-gpu", str(RANKS_PER_GPU)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ranktest.plugin", "-p", "no:cacheprovider", "-m", "ranks"]
    command += ["--without-extras", "--tb", "line", *(device if is_cuda else ["--collect-only"]), "tests"]
    started = {
        name: subprocess.Popen(
            command, cwd=ROOT / "packages" / name, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for name in PACKAGES
    }
    yield started
    for process in started.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("package", PACKAGES)
def test_suite(suites: dict[str, subprocess.Popen[str]], package: str) -> None:
    output, _ = suites[package].communicate(timeout=560)
    code = suites[package].returncode
    write_row(package=package, code=code, outcome=output.strip().splitlines()[-1:])
    assert code == 0, output[-4000:]
