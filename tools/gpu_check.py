#!/usr/bin/env python3
"""Checks that need a GPU, in one run.

    python3 tools/gpu_check.py --out FOLDER             on a GPU machine, from the source tree, nothing installed
    python3 tools/gpu_check.py --out FOLDER --dry-run   on the CPU, small, what can run there

Needs torch >= 2.11 and pytest. Each section runs in a process of its own with a time limit, so that one that hangs
does not lose the others; FOLDER gets `gpu_check.json`. Several NCCL ranks on one GPU need NCCL 2.30 (`LD_PRELOAD` a
newer `libnccl.so.2`); without it the suites run over gloo on CUDA tensors. Exit 0: every claim held.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SOURCES = [ROOT / "tools" / "ranktest" / "src", *(ROOT / "packages" / name / "src" for name in PACKAGES)]
Row = dict[str, Any]
Settings = argparse.Namespace  # dry_run, ranks


def device_of(settings: Settings) -> torch.device:
    return torch.device("cpu" if settings.dry_run else "cuda:0")


def claim(what: str, measured: float, wanted: str, holds: bool) -> Row:
    """One number that was promised, and what was measured."""
    return {"what": what, "measured": round(float(measured), 4), "wanted": wanted, "holds": bool(holds)}


def attempt(what: str, run: Callable[[], list[Row]], rows: list[Row], claims: list[Row]) -> None:
    """Collect the claims of one program; an error is a row and a claim that failed, and the next program runs."""
    try:
        claims += run()
    except Exception as error:
        rows.append({"what": what, "error": f"{type(error).__name__}: {error}"[:2000]})
        claims.append(claim(what, 0, "runs", False))


@contextmanager
def one_rank(settings: Settings) -> Iterator[None]:
    """A default group of one rank: NCCL on the GPU, gloo in a dry run."""
    device = device_of(settings)
    if not settings.dry_run:
        torch.cuda.set_device(device)
    hash_store: Any = vars(dist)["HashStore"]  # torch's annotations leave it out
    backend, bound = ("gloo", None) if settings.dry_run else ("nccl", device)
    dist.init_process_group(backend, store=hash_store(), rank=0, world_size=1, device_id=bound)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def no_host_waits(settings: Settings) -> Iterator[None]:
    """Make torch raise where the host would wait for the device."""
    switch: Any = (lambda mode: None) if settings.dry_run else torch.cuda.set_sync_debug_mode
    synchronize(settings)
    switch("error")
    try:
        yield
    finally:
        switch("default")


def synchronize(settings: Settings) -> None:
    if not settings.dry_run:
        torch.cuda.synchronize()


def timed(call: Callable[[], object], settings: Settings) -> float:
    """Seconds of one call: the median of several, after two that do not count."""
    times = []
    for _ in range(4 if settings.dry_run else 22):
        synchronize(settings)
        start = time.perf_counter()
        call()
        synchronize(settings)
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]


# ---- sections
def environment(settings: Settings) -> Row:
    """Versions and the device."""
    versions: Row = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if not settings.dry_run:
        properties = torch.cuda.get_device_properties(0)
        versions |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        versions |= {"devices": torch.cuda.device_count(), "nccl": str(torch.cuda.nccl.version())}
    return versions


def nccl_one_rank(settings: Settings) -> Row:
    """Collectives under NCCL with one rank: right values, and no wait for the device."""
    claims = []
    with one_rank(settings):
        x = torch.arange(1024, dtype=torch.float32, device=device_of(settings))
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
            equal = int((out == x).sum())
            claims.append(claim(name, equal, "1024 values equal", equal == 1024))
    return {"claims": claims}


def sync_debug(settings: Settings) -> Row:
    """No package waits for the device after its first call."""
    rows, claims = list[Row](), list[Row]()

    def run(name: str, make: Callable[[Settings], Callable[[], object]]) -> list[Row]:
        with one_rank(settings):
            call = make(settings)
            call()
            call()
            with no_host_waits(settings):
                for _ in range(3):
                    call()
        return [claim(name, 3, "3 calls run" if settings.dry_run else "3 calls without a wait", True)]

    for name, make in PROGRAMS.items():
        attempt(name, partial(run, name, make), rows, claims)
    return {"rows": rows, "claims": claims}


def reshard_program(settings: Settings, later: bool = False) -> Callable[[], object]:
    from shard_reshard import Resharder, plan_reshard, reshard

    x = torch.ones(64, 96, device=device_of(settings))
    if later:
        return lambda: reshard(x, "1: S(0)", "1: S(1)", shape=(64, 96), async_op=True).wait()
    resharder = Resharder(plan_reshard((64, 96), torch.float32, "1: S(0)", "1: S(1)"))
    return lambda: resharder(x)


def styles_program(settings: Settings, bridged: bool = False) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

    device = device_of(settings)
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


def partition_program(settings: Settings, style: str) -> Callable[[], object]:
    step, arguments = partitioned_step(settings, style)
    return lambda: step(*arguments)


def partitioned_step(settings: Settings, style: str, backend: Any = "eager") -> tuple[Any, tuple[Any, ...]]:
    """A train step made data-parallel, and its arguments."""
    import dp_partition
    from torch.distributed.device_mesh import init_device_mesh

    device = device_of(settings)
    width, layers, rows = (32, 2, 8) if settings.dry_run else (2048, 8, 4096)
    torch.manual_seed(0)  # the same weights and rows for every backend
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    optimizer: torch.optim.Optimizer
    if settings.dry_run:  # on the CPU, AdamW's step count is a number in the graph, and every step compiles anew
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    kind = dp_partition.DataParallelStyle[style.upper()]
    step = dp_partition.compile(train, mesh=mesh, style=kind, backend=backend)
    return step, (model, optimizer, torch.randn(rows, width, device=device))


PROGRAMS: dict[str, Callable[[Settings], Callable[[], object]]] = {
    "shard-reshard": reshard_program,
    "shard-reshard, async": partial(reshard_program, later=True),
    "tp-styles": styles_program,
    "tp-ddp-bridge": partial(styles_program, bridged=True),
    "dp-partition, replicate": partial(partition_program, style="replicate"),
    "dp-partition, fully_shard": partial(partition_program, style="fully_shard"),
}


def lowering(settings: Settings) -> Row:
    """dp-partition's graph as it is and through inductor: five steps compared, and the times."""
    rows, claims = list[Row](), list[Row]()

    def run(style: str) -> list[Row]:
        values: dict[str, list[torch.Tensor]] = {}
        row: Row = {"what": style}
        for backend in ("eager", "inductor"):
            with one_rank(settings):
                step, arguments = partitioned_step(settings, style, backend)
                values[backend] = [step(*arguments).clone() for _ in range(5)]
                with step.unsharded():
                    values[backend] += [parameter.detach().clone() for parameter in arguments[0].parameters()]
                row[f"{backend}_ms"] = round(1e3 * timed(partial(step, *arguments), settings), 3)
        pairs = list(zip(values["eager"], values["inductor"], strict=True))
        error = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        rows.append(row | {"compared": len(pairs)})
        return [claim(f"{style}: largest difference of {len(pairs)} tensors", error, "<= 1e-4", error <= 1e-4)]

    for style in ("replicate", "fully_shard"):
        attempt(style, partial(run, style), rows, claims)
    return {"rows": rows, "claims": claims}


def packing(settings: Settings) -> Row:
    """shard-reshard's packing and unpacking against a copy of the same bytes and the bytes that it promises."""
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering.program import build_program

    side, device, rows, claims = (64 if settings.dry_run else 32768), device_of(settings), [], []
    for dtype in (torch.bfloat16, torch.float32):
        for src, dst in (("8: S(0)", "8: S(1)"), ("8: S(1)", "8: S(0)"), ("2x4: S(0), S(1)", "2x4: S(1), S(0)")):
            plan = plan_reshard((side, side), dtype, src, dst)
            exchange = Exchange(build_program((plan,), 3, 8))  # rank 3's part; nothing is sent
            sources = [torch.ones(local, dtype=dtype, device=device) for local in plan.src.local_shapes(3)]

            def call(outs: Any = None, exchange: Any = exchange, sources: Any = sources) -> None:
                outs = exchange.allocate(device) if outs is None else outs
                exchange.prepare(sources, outs, device).run(lambda *_: None, False)

            outs, copied = exchange.allocate(device), 0
            for memory in (recipe.memory for recipe in exchange.recipes(sources, outs)):
                copied += sum(side.num_bytes for side in (memory.sends, memory.receives) if side.span is None)
                copied += sum(math.prod(source.sizes) * plan.itemsize for source, *_ in memory.own)
            plain = torch.ones(max(copied // 4, 1), device=device)
            ratio = timed(partial(torch.empty_like(plain).copy_, plain), settings) / timed(
                partial(call, outs), settings
            )
            del outs, plain
            name = f"{str(dtype).removeprefix('torch.')} {src} -> {dst}"
            rows.append({"what": name, "copied_bytes": copied, "promised_bytes": plan.peak_bytes(3)})
            if settings.dry_run:
                continue
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            peak = (torch.cuda.max_memory_allocated() - before) / plan.peak_bytes(3)
            claims.append(claim(f"{name}: speed", ratio, ">= 0.85 of a plain copy", ratio >= 0.85 or not copied))
            claims.append(claim(f"{name}: peak", peak, "<= 1.02 of what was promised", peak <= 1.02))
    return {"rows": rows, "claims": claims}


def suites_nccl(settings: Settings) -> Row:
    """Packages' multi-rank tests under NCCL on one GPU."""
    if not settings.dry_run and tuple(torch.cuda.nccl.version())[:2] < (2, 30):
        return {
            "not_run": f"NCCL {torch.cuda.nccl.version()} refuses two ranks on one GPU, 2.30 does not: see suites-gloo"
        }
    return suites("cpu:gloo,cuda:nccl", settings)


def suites_gloo(settings: Settings) -> Row:
    """Packages' multi-rank tests over gloo on CUDA tensors."""
    return suites("gloo", settings)


def suites(backend: str, settings: Settings) -> Row:
    """All packages' `@ranks` tests at once, each in a pytest of its own; a dry run only collects them."""
    options = ["--ranks-device", "cuda", "--ranks-backend", backend, "--ranks-per-gpu", str(settings.ranks)]
    options = ["--collect-only"] if settings.dry_run else [*options, "--tb", "short"]
    with ThreadPoolExecutor(len(PACKAGES)) as threads:
        rows = list(threads.map(partial(suite, options), PACKAGES))
    if settings.dry_run:
        claims = [claim(row["package"], row["code"], "collected", row["code"] in (0, 5)) for row in rows]
    else:
        claims = [claim(row["package"], row["passed"], "all pass", row["passed"] == row["tests"] > 0) for row in rows]
    return {"rows": rows, "claims": claims}


def suite(options: list[str], package: str) -> Row:
    """One package's `@ranks` tests with the plugin from the source tree; counts, and each failure's first line."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "ranktest.plugin", "-p", "no:cacheprovider"]
        command += ["-m", "ranks", "--without-extras", "--junitxml", str(xml), *options, "tests"]
        done = subprocess.run(command, cwd=ROOT / "packages" / package, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(xml).iter("testcase")) if xml.exists() else []
    ran = [case for case in cases if case.find("skipped") is None]
    failed = {case: part for case in ran for part in case if part.tag in ("failure", "error")}
    row: Row = {"package": package, "code": done.returncode, "tests": len(ran), "passed": len(ran) - len(failed)}
    if done.returncode not in (0, 1, 5):
        row["error"] = done.stdout[-2000:] + done.stderr[-1000:]
    return row | {"failures": [f"{c.get('name')}: {part.get('message', '')[:300]}" for c, part in failed.items()]}


SECTIONS: dict[Callable[[Settings], Row], int] = {  # seconds that each may take
    environment: 120, nccl_one_rank: 180, sync_debug: 240, packing: 300,
    lowering: 420, suites_nccl: 560, suites_gloo: 560,
}  # fmt: skip
BY_NAME = {section.__name__.replace("_", "-"): section for section in SECTIONS}


def run_section(name: str, arguments: Settings) -> Row:
    """Run a section in its own process group and time limit."""
    section = BY_NAME[name]
    entry: Row = {"section": name, "about": section.__doc__}
    path = os.pathsep.join(map(str, SOURCES))
    fixed = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--run-section", name, "--result", str(result)]
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | fixed, start_new_session=True)
        try:
            status = f"failed with exit code {process.wait(SECTIONS[section])}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = f"timed out after {SECTIONS[section]} s"
        entry["seconds"] = round(time.monotonic() - start, 1)
        if result.exists():
            entry |= json.loads(result.read_text())
            holds = all(each["holds"] for each in entry.get("claims", []))
            status = "not run" if "not_run" in entry else "good" if holds else "claims failed"
        else:
            log.seek(0)
            entry["log"] = log.read()[-4000:]
    return entry | {"status": status}


def main(argv: list[str]) -> int:
    """Run the chosen sections one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU what can run there")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="SECTION", default=list(BY_NAME))
    parser.add_argument("--ranks", type=int, default=4, help="ranks per GPU in the suites (default: 4)")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.run_section:
        arguments.result.write_text(json.dumps(BY_NAME[arguments.run_section](arguments), default=str))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    entries: list[Row] = []
    for name in arguments.only:
        entries.append(run_section(name, arguments))
        print(json.dumps(entries[-1], indent=1), flush=True)
        text = json.dumps({"dry_run": arguments.dry_run, "sections": entries}, indent=1)
        (arguments.out / "gpu_check.json").write_text(text + "\n")
    return 0 if all(entry["status"] in ("good", "not run") for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
