#!/usr/bin/env python3
"""What only a machine with a GPU can raise_on_all_ranks, in one run.

    python3 tools/gpu_check.py --out FOLDER             on a GPU machine, from the source tree, nothing installed
    python3 tools/gpu_check.py --out FOLDER --dry-run   prints the plan and runs on the CPU, small, what can run there

Needs torch >= 2.11, pytest and Python >= 3.11. Each section runs in a process of its own with a time limit, so that one
that fails, hangs or crashes does not lose the others. FOLDER gets `gpu_check.json` and `gpu_check.md`, rewritten after
each section. Several NCCL ranks on one GPU need NCCL 2.30 (`LD_PRELOAD` a newer `libnccl.so.2` if torch has an older
one); without it the multi-rank suites run over gloo on CUDA tensors, and NCCL is exercised with one rank.

Exit code: 0 if every section ran and every claim held, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SOURCES = [ROOT / "tools" / "ranktest" / "src", *(ROOT / "packages" / name / "src" for name in PACKAGES)]
NCCL_MULTI_RANK = (2, 30)
GIB = 2**30

Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        dry: On the CPU, with small sizes.
        ranks: Ranks per GPU in the multi-rank suites.
        keyword: Passed to the suites' pytest as `-k`.
    """

    dry: bool
    ranks: int
    keyword: str

    @property
    def device(self) -> str:
        """Where tensors are made."""
        return "cpu" if self.dry else "cuda:0"


@dataclass(frozen=True)
class Section:
    """One part of the check: a function that runs in its own process, and its limit."""

    run: Callable[[Settings], Result]
    seconds: int
    about: str

    @property
    def name(self) -> str:
        """The function's name with dashes."""
        return self.run.__name__.replace("_", "-")


def claim(what: str, found: float, wanted: str, holds: bool) -> Result:
    """One number that was promised, and what it came to."""
    return {"what": what, "found": round(found, 4), "wanted": wanted, "holds": bool(holds)}


# ---- sections -------------------------------------------------------------------------------------------------------
def environment(settings: Settings) -> Result:
    """Versions and the device."""
    import torch

    found: Result = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if not settings.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)}
        found |= {"devices": torch.cuda.device_count(), "nccl": ".".join(map(str, nccl_version()))}
    return found


def suites_nccl(settings: Settings) -> Result:
    """Every package's tests on ranks, under NCCL, several ranks on one GPU."""
    if settings.dry:
        return collect_suites("cpu:gloo", settings)
    if nccl_version()[:2] < NCCL_MULTI_RANK:
        version = ".".join(map(str, nccl_version()))
        return {
            "not_run": f"NCCL {version} refuses two ranks on one GPU; 2.30 is needed: see nccl-one-rank, suites-gloo"
        }
    return run_suites("cpu:gloo,cuda:nccl", settings)


def suites_gloo(settings: Settings) -> Result:
    """Every package's tests on ranks, over gloo, on CUDA tensors."""
    return collect_suites("gloo", settings) if settings.dry else run_suites("gloo", settings)


def nccl_one_rank(settings: Settings) -> Result:
    """Collectives of each kind under NCCL with one rank: what they return, and that none waits for the host."""
    import torch
    import torch.distributed as dist

    rows: list[Result] = []
    with one_rank(settings):
        x = torch.arange(1024, dtype=torch.float32, device=settings.device)
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
            with no_host_waits(settings):
                call()
            rows.append({"call": name, "right": bool(torch.equal(out, x))})
    return {
        "rows": rows,
        "claims": [claim(row["call"], float(row["right"]), "equal values", row["right"]) for row in rows],
    }


def sync_debug(settings: Settings) -> Result:
    """After its first call no package waits for the device: `set_sync_debug_mode("error")` on the later ones."""
    rows = []
    wanted = "runs; the CPU cannot tell more" if settings.dry else "no waits"
    for name, make in PROGRAMS.items():
        error = ""
        with one_rank(settings):
            try:
                call = make(settings)
                call()
                call()
                with no_host_waits(settings):
                    for _ in range(3):
                        call()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"[:2000]
        rows.append({"program": name, "error": error})
    return {
        "rows": rows,
        "claims": [claim(row["program"], float(not row["error"]), wanted, not row["error"]) for row in rows],
    }


def pack_bandwidth(settings: Settings) -> Result:
    """shard-reshard's packing and unpacking against a device-to-device copy of the same bytes; nothing is sent."""
    import torch
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering.program import build_program

    side, world, rank = (64 if settings.dry else 32768), 8, 3
    device = torch.device(settings.device)
    rows, claims = [], []
    for dtype in (torch.bfloat16, torch.float32):
        for src, dst in (("8: S(0)", "8: S(1)"), ("8: S(1)", "8: S(0)"), ("2x4: S(0), S(1)", "2x4: S(1), S(0)")):
            plan = plan_reshard((side, side * 2), dtype, src, dst)
            exchange = Exchange(build_program((plan,), rank, world), keep_workspace=True)
            sources = [torch.ones(shape, dtype=dtype, device=device) for shape in plan.src.local_shapes(rank)]
            outs = exchange.allocate(device)
            copied = bytes_copied(exchange.memories(sources, outs), plan.itemsize)

            def call(exchange: Any = exchange, sources: Any = sources, outs: Any = outs) -> None:
                exchange.start(sources, outs, lambda *_: None, device, False)()

            plain = torch.ones(max(copied // 4, 1), dtype=torch.float32, device=device)
            target = torch.empty_like(plain)
            ours, copy = timed(call, settings), timed(partial(target.copy_, plain), settings)
            ratio = copy / ours if copied else 1.0
            name = f"{str(dtype).removeprefix('torch.')} {src} -> {dst}"
            rows.append(
                {"change": name, "copied_gib": round(copied / GIB, 3), "ms": round(1e3 * ours, 3)}
                | {"gb_per_s": round(2 * copied / ours / 1e9, 1), "of_plain_copy": round(ratio, 3)}
            )
            if not settings.dry:
                claims.append(claim(name, ratio, ">= 0.85 of a plain copy", ratio >= 0.85))
            del exchange, sources, outs, plain, target
    return {"rows": rows, "claims": claims}


def lowering(settings: Settings) -> Result:
    """dp-partition's graph as it is, through inductor, and as a CUDA graph: equal results, and the times."""
    rows: list[Result] = []
    claims: list[Result] = []
    for style in ("replicate", "fully_shard"):
        try:
            with one_rank(settings):
                row, held = lower_style(settings, style)
        except Exception as problem:
            row = {"style": style, "error": f"{type(problem).__name__}: {problem}"[:2000]}
            held = [claim(style, 0.0, "runs", False)]
        rows.append(row)
        claims += held
    return {"rows": rows, "claims": claims}


def lower_style(settings: Settings, style: str) -> tuple[Result, list[Result]]:
    """The same for one style."""
    import torch

    step, inputs = partitioned_step(settings, style)
    module = step.graph

    def fresh() -> list[Any]:
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        values = fresh()
        with torch.no_grad():
            returned = function(*values)
        return [value.clone() for value in [*flat_tensors(returned), *flat_tensors(values)]]

    def milliseconds(function: Callable[..., Any]) -> float:
        values = fresh()

        def call() -> None:
            with torch.no_grad():
                function(*values)

        return round(1e3 * timed(call, settings), 3)

    expected = results(module)
    row: Result = {"style": style, "compared": len(expected), "eager_ms": milliseconds(module)}
    claims = []
    ways: dict[str, Callable[[], Any]] = {"inductor": lambda: compiled(module)}
    if not settings.dry:
        ways["cuda_graph"] = lambda: captured(module, fresh())
    for name, lower in ways.items():
        try:
            function = lower()
            error = largest_difference(results(function), expected)
            row[f"{name}_ms"] = milliseconds(function)
            claims.append(claim(f"{style}, {name}: largest difference", error, "<= 1e-4", error <= 1e-4))
        except Exception as problem:
            row[f"{name}_error"] = f"{type(problem).__name__}: {problem}"[:2000]
            claims.append(claim(f"{style}, {name}", 0.0, "runs", False))
    return row, claims


def allocator_peaks(settings: Settings) -> Result:
    """Memory that was promised against what the CUDA allocator saw."""
    rows: list[Result] = []
    measures: dict[str, Callable[[], tuple[int, int]]] = {
        "reshard": lambda: reshard_peak(settings, None),
        "reshard, workspace limited to an eighth": lambda: reshard_peak(settings, 8),
        "dp-partition replicate, one step": lambda: partition_peak(settings, "replicate"),
        "dp-partition fully_shard, one step": lambda: partition_peak(settings, "fully_shard"),
    }
    claims = []
    for name, measure in measures.items():
        try:
            promised, measured = measure()
        except Exception as problem:
            rows.append({"what": name, "error": f"{type(problem).__name__}: {problem}"[:2000]})
            claims.append(claim(name, 0.0, "runs", False))
            continue
        rows.append({"what": name, "promised_mib": promised / 2**20, "measured_mib": measured / 2**20})
        if promised and not settings.dry:
            ratio = measured / promised
            claims.append(claim(f"{name}: measured of promised", ratio, "<= 1.02", ratio <= 1.02))
    return {"rows": rows, "claims": claims}


def reshard_peak(settings: Settings, part: int | None) -> tuple[int, int]:
    """Promised and measured bytes of a change of layout, nothing sent; its workspace limited to 1 / part of a shard."""
    import torch
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering.program import build_program

    side, device = (64 if settings.dry else 16384), torch.device(settings.device)
    limit = None if part is None else side * side * 4 // 8 // part
    plan = plan_reshard((side, side), torch.float32, "8: S(0)", "8: S(1)", max_workspace_bytes=limit)
    exchange = Exchange(build_program((plan,), 3, 8))
    sources = [torch.ones(shape, device=device) for shape in plan.src.local_shapes(3)]

    def call() -> None:
        exchange.start(sources, exchange.allocate(device), lambda *_: None, device, False)()

    return plan.peak_bytes(3), peak_of(call, settings)


def partition_peak(settings: Settings, style: str) -> tuple[int, int]:
    """No promise, and measured bytes, of one run of a partitioned graph."""
    import torch

    with one_rank(settings):
        step, inputs = partitioned_step(settings, style)

        def call() -> None:
            with torch.no_grad():
                step.graph(*inputs)

        return 0, peak_of(call, settings)


SECTIONS = [
    Section(environment, 120, "versions and the device"),
    Section(nccl_one_rank, 180, "collectives under NCCL with one rank"),
    Section(sync_debug, 240, "no waits for the device after the first call"),
    Section(pack_bandwidth, 240, "pack and unpack bandwidth of shard-reshard"),
    Section(allocator_peaks, 180, "allocator peaks against promises"),
    Section(lowering, 420, "dp-partition through inductor and as CUDA graphs"),
    Section(suites_nccl, 560, "packages' multi-rank tests under NCCL on one GPU"),
    Section(suites_gloo, 560, "packages' multi-rank tests over gloo on CUDA tensors"),
]


# ---- suites ---------------------------------------------------------------------------------------------------------
def run_suites(backend: str, settings: Settings) -> Result:
    """All packages' `@ranks` tests at once, each package in a pytest of its own."""
    options = ["--ranks-device", "cuda", "--ranks-backend", backend, "--ranks-per-gpu", str(settings.ranks)]
    with ThreadPoolExecutor(len(PACKAGES)) as threads:
        rows = list(threads.map(lambda name: run_suite(name, [*options, "--tb", "short"], settings), PACKAGES))
    claims = [
        claim(row["package"], row["passed"], "all that ran pass", row["passed"] == row["tests"] > 0) for row in rows
    ]
    return {"rows": rows, "claims": claims}


def collect_suites(backend: str, settings: Settings) -> Result:
    """Collect the tests from the source tree, and run one of each package on the CPU."""
    rows = []
    for name in PACKAGES:
        listed = pytest_in(name, ["--collect-only", "-m", "ranks"], settings)
        tests = [line for line in listed.stdout.splitlines() if "::" in line and " " not in line.split("::")[0]]
        row: Result = {"package": name, "collected": len(tests), "code": listed.returncode}
        if listed.returncode not in (0, 5):
            row["error"] = listed.stdout[-1500:]
        rows.append(row)
    claims = [claim(row["package"], row["collected"], "collected without error", row["code"] in (0, 5)) for row in rows]
    return {"rows": rows, "claims": claims, "backend": backend}


def run_suite(package: str, options: list[str], settings: Settings) -> Result:
    """One package's `@ranks` tests; counts, and each failure's first line."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        start = time.monotonic()
        done = pytest_in(package, ["-m", "ranks", "--junitxml", str(xml), *options], settings)
        row: Result = {"package": package, "seconds": round(time.monotonic() - start, 1), "code": done.returncode}
        row |= {"tests": 0, "passed": 0, "failures": [], "not_run": done.stdout.count(" ranks, there are ")}
        if not xml.exists():
            return row | {"error": done.stdout[-3000:]}
        for case in ElementTree.parse(xml).iter("testcase"):
            problems = [child for child in case if child.tag in ("failure", "error")]
            skipped = any(child.tag == "skipped" for child in case)
            row["tests"] += not skipped
            row["passed"] += not skipped and not problems
            for problem in problems:
                first = (problem.get("message") or "").splitlines() or [""]
                row["failures"].append(f"{case.get('classname')}::{case.get('name')}: {first[0][:300]}")
        return row


def pytest_in(package: str, options: list[str], settings: Settings) -> subprocess.CompletedProcess[str]:
    """Pytest in a package's folder, with the plugin from the source tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ranktest.plugin", "-p", "no:cacheprovider"]
    command += ["--without-extras", *options, *(["-k", settings.keyword] if settings.keyword else []), "tests"]
    folder = ROOT / "packages" / package
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


# ---- programs -------------------------------------------------------------------------------------------------------
def reshard_program(settings: Settings) -> Callable[[], object]:
    """shard-reshard: one plan, called again and again."""
    import torch
    from shard_reshard import Resharder, plan_reshard

    resharder = Resharder(plan_reshard((64, 96), torch.float32, "1: S(0)", "1: S(1)"))
    x = torch.ones(64, 96, device=settings.device)
    return lambda: resharder(x)


def async_reshard_program(settings: Settings) -> Callable[[], object]:
    """shard-reshard: a handle, waited for later."""
    import torch
    from shard_reshard import reshard

    x = torch.ones(64, 96, device=settings.device)
    return lambda: reshard(x, "1: S(0)", "1: S(1)", shape=(64, 96), async_op=True).wait()


def styles_program(settings: Settings, bridged: bool = False) -> Callable[[], object]:
    """tp-styles: a step of a model with column- and row-wise layers; with tp-ddp-bridge's DDP around it."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

    mesh = init_device_mesh(torch.device(settings.device).type, (1, 1), mesh_dim_names=("dp", "tp"))
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(settings.device)
    apply_plan(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if bridged:
        from tp_ddp_bridge import wrap_ddp

        model = wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(8, 32, device=settings.device)

    def call() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def bridge_program(settings: Settings) -> Callable[[], object]:
    """tp-ddp-bridge: the same model inside DDP."""
    return styles_program(settings, bridged=True)


def replicate_program(settings: Settings) -> Callable[[], object]:
    """dp-partition, replicated."""
    step, arguments = data_parallel_step(settings, "replicate")
    return lambda: step(*arguments)


def fully_shard_program(settings: Settings) -> Callable[[], object]:
    """dp-partition, fully sharded."""
    step, arguments = data_parallel_step(settings, "fully_shard")
    return lambda: step(*arguments)


PROGRAMS = {
    "shard-reshard": reshard_program,
    "shard-reshard, async": async_reshard_program,
    "tp-styles": styles_program,
    "tp-ddp-bridge": bridge_program,
    "dp-partition, replicate": replicate_program,
    "dp-partition, fully_shard": fully_shard_program,
}


def data_parallel_step(settings: Settings, style: str) -> tuple[Any, tuple[Any, ...]]:
    """A train step made data-parallel, and its arguments."""
    import dp_partition
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    width, layers, rows = (32, 2, 8) if settings.dry else (2048, 8, 4096)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    torch.manual_seed(0)
    model = nn.Sequential(*blocks).to(settings.device)
    optimizer: torch.optim.Optimizer
    if settings.dry:  # on the CPU, AdamW's step count is a number in the graph, and every step compiles anew
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=True)
    x = torch.randn(rows, width, device=settings.device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    mesh = init_device_mesh(torch.device(settings.device).type, (1,), mesh_dim_names=("dp",))
    return dp_partition.compile(train, mesh=mesh, style=style), (model, optimizer, x)


def partitioned_step(settings: Settings, style: str) -> tuple[Any, list[Any]]:
    """A step that has run twice, and what its graph takes for the third time."""
    step, arguments = data_parallel_step(settings, style)
    step(*arguments)
    step(*arguments)
    from dp_partition.feeding import gather_inputs
    from dp_partition.step import runner_of

    runner = runner_of(step)
    assert runner.latest is not None  # it has run
    return step, gather_inputs(runner.bound(), runner.latest, arguments, {})


# ---- means ----------------------------------------------------------------------------------------------------------
@contextmanager
def one_rank(settings: Settings) -> Iterator[None]:
    """A default group of one rank: NCCL on the GPU, gloo in a dry run."""
    import torch
    import torch.distributed as dist

    device = None if settings.dry else torch.device(settings.device)
    if device is not None:
        torch.cuda.set_device(device)
    backend = "gloo" if settings.dry else "nccl"
    dist.init_process_group(backend, store=hash_store(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hash_store() -> Any:
    """A store within this process."""
    import torch.distributed as dist

    module: Any = dist
    return module.HashStore()


@contextmanager
def no_host_waits(settings: Settings) -> Iterator[None]:
    """Make torch raise where the host would wait for the device."""
    import torch

    if settings.dry:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded."""
    import torch

    nccl: Any = torch.cuda.nccl
    return tuple(nccl.version())


def timed(call: Callable[[], object], settings: Settings) -> float:
    """Seconds of one call: the median of several, after two that do not count."""
    import torch

    event: Any = torch.cuda.Event
    times = []
    for at in range(4 if settings.dry else 22):
        if settings.dry:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        else:
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        if at >= 2:
            times.append(seconds)
    return sorted(times)[len(times) // 2]


def peak_of(call: Callable[[], object], settings: Settings) -> int:
    """Most bytes allocated during a call, beyond what was allocated before; 0 in a dry run."""
    import torch

    call()
    if settings.dry:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bytes_copied(memories: Any, itemsize: int) -> int:
    """Bytes that packing, unpacking and own copies write."""
    total = 0
    for memory in memories:
        total += sum(0 if side.run is not None else side.num_bytes for side in (memory.sends, memory.receives))
        total += sum(math.prod(source.sizes) * itemsize for source, *_ in memory.own)
    return total


def compiled(module: Callable[..., Any]) -> Callable[..., Any]:
    """A function through inductor."""
    import torch

    compile_it: Any = torch.compile
    function: Callable[..., Any] = compile_it(module, dynamic=False)
    return function


def captured(module: Callable[..., Any], values: list[Any]) -> Callable[..., Any]:
    """A CUDA graph of a function, replayed on copies of its arguments, which get its in-place changes back."""
    import torch

    static = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            module(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        results = module(*static)

    def replay(*arguments: Any) -> Any:
        for own, given in zip(static, arguments, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        graph.replay()
        for own, given in zip(static, arguments, strict=True):
            if isinstance(own, torch.Tensor):
                given.copy_(own)
        return results

    return replay


def flat_tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    import torch

    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in flat_tensors(value)]
    return []


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest absolute difference of two lists of tensors, which must not be empty."""
    pairs = list(zip(found, expected, strict=True))
    if not pairs:
        raise ValueError("nothing to compare")
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


# ---- running and reporting ------------------------------------------------------------------------------------------
def run_section(section: Section, arguments: argparse.Namespace) -> Result:
    """Run a section in its own process group and time limit."""
    entry: Result = {"section": section.name, "about": section.about}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__)), "--run-section", section.name, "--result", str(result)]
        command += ["--out", str(arguments.out), "--ranks", str(arguments.ranks), "--keyword", arguments.keyword]
        command += ["--dry-run"] if arguments.dry_run else []
        start = time.monotonic()
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
            )
            try:
                code: int | None = process.wait(section.seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, 9)
                process.wait()
            log.seek(0)
            text = log.read()
        entry["seconds"] = round(time.monotonic() - start, 1)
        if code == 0 and result.exists():
            entry |= json.loads(result.read_text())
            holds = all(found["holds"] for found in entry.get("claims", []))
            entry["status"] = (
                "not run" if isinstance(entry.get("not_run"), str) else "good" if holds else "claims failed"
            )
        else:
            entry["status"] = (
                f"timed out after {section.seconds} s" if code is None else f"failed with exit code {code}"
            )
            entry["log"] = text[-4000:]
    return entry


def child_environment() -> dict[str, str]:
    """The source tree on the path, one thread per process, no plugins but ours."""
    path = [*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **fixed, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def write_report(folder: Path, entries: list[Result], dry: bool) -> None:
    """`gpu_check.json` and `gpu_check.md`."""
    (folder / "gpu_check.json").write_text(
        json.dumps({"dry_run": dry, "sections": entries}, indent=1, default=str) + "\n"
    )
    lines = ["# GPU check" + (" (dry run on the CPU)" if dry else ""), ""]
    lines += table([{"section": e["section"], "status": e["status"], "seconds": e["seconds"]} for e in entries])
    for entry in entries:
        lines += ["", f"## {entry['section']}: {entry['about']}", ""]
        plain = {k: v for k, v in entry.items() if k not in ("section", "about", "rows", "claims", "log", "seconds")}
        lines += [f"- {key}: {value}" for key, value in plain.items()]
        lines += ["", *table(entry["rows"])] if entry.get("rows") else []
        lines += ["", *table(entry["claims"])] if entry.get("claims") else []
        lines += ["", "```", entry["log"], "```"] if entry.get("log") else []
    (folder / "gpu_check.md").write_text("\n".join(lines) + "\n")


def table(rows: list[Result]) -> list[str]:
    """A markdown table; lists are given as their length."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        values = [len(row[c]) if isinstance(row.get(c), list) else row.get(c, "") for c in columns]
        lines.append("| " + " | ".join(re.sub(r"[\n|]+", " ", str(value))[:300] for value in values) + " |")
    for row in rows:
        lines += [f"- {failure}" for failure in row.get("failures", [])]
    return lines


def main(argv: list[str]) -> int:
    """Run the chosen sections one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and gpu_check.md")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; run on the CPU what can run there")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], metavar="SECTION")
    parser.add_argument("--ranks", type=int, default=4, help="ranks per GPU in the suites (default: 4)")
    parser.add_argument("--keyword", default="", help="which tests of the suites (pytest -k)")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    chosen = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]

    if arguments.run_section:
        (section,) = [section for section in SECTIONS if section.name == arguments.run_section]
        found = section.run(Settings(arguments.dry_run, arguments.ranks, arguments.keyword))
        arguments.result.write_text(json.dumps(found, default=str))
        return 0

    if arguments.dry_run:
        print("plan:")
        for section in chosen:
            print(f"  {section.name}: {section.about}; at most {section.seconds} s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    entries: list[Result] = []
    for section in chosen:
        entries.append(run_section(section, arguments))
        print(f"{section.name}: {entries[-1]['status']}, {entries[-1]['seconds']} s", flush=True)
        write_report(arguments.out, entries, arguments.dry_run)
    print(f"report: {arguments.out / 'gpu_check.md'}")
    return 0 if all(entry["status"] in ("good", "not run") for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
