"""Multi-rank tests of all packages on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_check.common import NCCL_MULTI_RANK, Result, Settings, claim, nccl_version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SOURCES = [ROOT / "tools" / "ranktest" / "src", *(ROOT / "packages" / name / "src" for name in PACKAGES)]


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


def child_environment() -> dict[str, str]:
    """The source tree on the path, one thread per process, no plugins but ours."""
    path = [*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **fixed, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
