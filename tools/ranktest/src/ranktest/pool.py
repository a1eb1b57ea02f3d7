"""Code of the pytest process: it starts the server and runs jobs on ranks that the server forks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from ranktest import supervise
from ranktest.job import Job
from ranktest.supervise import Child, Member, Report


class Pool:
    """Runs jobs on ranks forked from a server that has imported torch already."""

    def __init__(self, pytest_args: list[str]) -> None:
        self.pytest_args = pytest_args
        self.folder = Path(tempfile.mkdtemp(prefix="ranktest-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.control: Connection | None = None
        self.num_jobs = 0
        self.learnt: list[str] = []

    # ---- server
    def start(self) -> None:
        """Start the server and wait until it has imported torch."""
        ours, theirs = Pipe()
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ranktest.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_server_environment(),
            )
        theirs.close()
        self.control = ours
        start = {"do": "start", "sys_path": list(sys.path), "cwd": os.getcwd(), "pytest_args": self.pytest_args}
        ours.send(start)
        ours.recv()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send one request to the server; returns its answer.

        Raises:
            RuntimeError: the server ended; with its log.
        """
        try:
            if self.control is None:
                self.start()
            assert self.control is not None
            self.control.send(request)
            for fd in fds:
                send_handle(self.control, fd, None)  # a file descriptor takes no process id
            answer: dict[str, Any] = self.control.recv()
        except (EOFError, ConnectionError):
            log = (self.folder / "server.log").read_text(errors="replace")
            self.stop()
            raise RuntimeError(f"the server that ranks are forked from ended:\n{log}") from None
        return answer

    def stop(self) -> None:
        """End the server."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = self.control = None

    def close(self) -> None:
        """End the server and remove the folder of outputs."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- jobs
    def job_folder(self) -> str:
        """Make a folder for one job's outputs and stacks."""
        self.num_jobs += 1
        folder = self.folder / str(self.num_jobs)
        folder.mkdir()
        return str(folder)

    def run(self, job: Job) -> Report:
        """Run a job on its ranks, to the end of every one of them."""
        loaded = self.ask({"do": "load", "path": job.path, "learnt": self.learnt})
        if not loaded["ok"]:
            raise RuntimeError(f"importing {job.path} for the ranks failed:\n{loaded['error']}")
        start = time.monotonic()
        pipes = [Pipe() for _ in range(job.world_size)]
        pids = self.ask({"do": "fork", "job": job}, [theirs.fileno() for _, theirs in pipes])["pids"]
        for _, theirs in pipes:
            theirs.close()
        children = [Child(Member(rank), pid, pipes[rank][0]) for rank, pid in enumerate(pids)]
        folder = Path(job.folder)
        supervise.watch(children, folder, job.rest_s, self._reap)
        report = Report([child.member for child in children], time.monotonic() - start)
        shutil.rmtree(folder, ignore_errors=True)
        outcomes = [member.outcome for member in report.members if member.outcome is not None]
        self.learnt = list(dict.fromkeys(name for outcome in outcomes for name in outcome.imported))
        return report

    def _reap(self, pids: list[int], timeout_s: float) -> dict[int, int | None]:
        ended: dict[int, int | None] = self.ask({"do": "reap", "pids": pids, "timeout_s": timeout_s})["ended"]
        return ended


def _server_environment() -> dict[str, str]:
    """The environment of ranks: one thread, loopback only, this plugin importable, no other plugins."""
    source = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the rank: no pool of helpers that would not survive the fork
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not initialise it before the fork
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
