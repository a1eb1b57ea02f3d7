"""Engine one, the side of the pytest process: start the server, run jobs on freshly forked ranks, judge them."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranktest import wire
from ranktest.job import Job, Outcome

#: How long the other ranks get after the first failure.
GRACE_S = 5.0
#: How long a silent rank gets to write its stack.
STACK_S = 0.5


@dataclass
class Member:
    """One forked rank as the pytest process sees it."""

    rank: int
    pid: int
    channel: socket.socket
    outcome: Outcome | None = None
    lost: bool = False  # closed its socket without an answer
    silent: bool = False  # did not answer in time
    exit_code: int | None = None


@dataclass
class Report:
    """What a job's ranks did."""

    members: list[Member]
    folder: Path
    seconds: float
    timed_out: bool
    stacks: dict[int, str] = field(default_factory=dict)
    output: dict[int, str] = field(default_factory=dict)


class Pool:
    """Runs jobs on ranks forked from a server that has imported torch already."""

    def __init__(self, pytest_args: list[str], preload: list[str]) -> None:
        self.pytest_args = pytest_args
        self.preload = preload
        self.folder = Path(tempfile.mkdtemp(prefix="ranktest-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.count = 0

    # ---- server
    def start(self) -> None:
        """Start the server; returns at once, the first request waits for it."""
        if self.process is not None:
            return
        ours, theirs = socket.socketpair()
        source = str(Path(__file__).resolve().parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ranktest.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        theirs.close()
        self.control = ours
        wire.send(
            ours,
            {
                "do": "start",
                "sys_path": list(sys.path),
                "cwd": os.getcwd(),
                "pytest_args": self.pytest_args,
                "preload": self.preload,
            },
        )
        self._starting = True

    def ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        """One request to the server and its answer."""
        self.start()
        assert self.control is not None
        try:
            if self._starting:
                wire.receive(self.control)
                self._starting = False
            wire.send(self.control, request)
            if fds is not None:
                socket.send_fds(self.control, [b"x"], fds)
            answer: dict[str, Any] = wire.receive(self.control)
        except (EOFError, BrokenPipeError) as error:
            log = (self.folder / "server.log").read_text(errors="replace")
            self.stop_server()
            raise RuntimeError(f"the server that ranks are forked from ended:\n{log}") from error
        return answer

    def stop_server(self) -> None:
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
        self.stop_server()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- jobs
    def job_folder(self) -> Path:
        """A fresh folder for one job's outputs and stacks."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        return folder

    def run(self, job: Job) -> Report:
        """Run a job on its ranks, to the end of every one of them."""
        loaded = self.ask({"do": "load", "path": job.path})
        if not loaded["ok"]:
            raise RuntimeError(f"importing {job.path} for the ranks failed:\n{loaded['error']}")
        pairs = [socket.socketpair() for _ in range(job.world_size)]
        answer = self.ask({"do": "fork", "job": job}, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        members = [
            Member(rank, pid, ours) for rank, (pid, (ours, _)) in enumerate(zip(answer["pids"], pairs, strict=True))
        ]
        report = Report(members, Path(job.folder), 0.0, False)
        start = time.monotonic()
        try:
            self._collect(report, start + job.timeout_s)
            self._dump_silent(report)
        finally:
            self._end(report)
            report.seconds = time.monotonic() - start
        for member in members:
            out = report.folder / f"{member.rank}.out"
            report.output[member.rank] = out.read_text(errors="replace") if out.exists() else ""
            stack = report.folder / f"{member.rank}.stack"
            if stack.exists() and stack.stat().st_size:
                report.stacks[member.rank] = stack.read_text(errors="replace")
        shutil.rmtree(report.folder, ignore_errors=True)
        return report

    def _collect(self, report: Report, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            for member in report.members:
                selector.register(member.channel, selectors.EVENT_READ, member)
            waiting = len(report.members)
            failed = False
            while waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    report.timed_out = not failed
                    break
                for key, _ in selector.select(left):
                    member = key.data
                    try:
                        member.outcome = wire.receive(member.channel)
                    except EOFError:
                        member.lost = True
                    selector.unregister(member.channel)
                    waiting -= 1
                    if (member.lost or member.outcome.status == "failed") and not failed:
                        failed = True
                        deadline = min(deadline, time.monotonic() + GRACE_S)

    def _dump_silent(self, report: Report) -> None:
        silent = [member for member in report.members if member.outcome is None and not member.lost]
        for member in silent:
            member.silent = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        if silent:
            time.sleep(STACK_S)

    def _end(self, report: Report) -> None:
        for member in report.members:
            if member.outcome is None and not member.lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            else:
                with contextlib.suppress(OSError):
                    wire.send(member.channel, "leave")
        pids = [member.pid for member in report.members]
        ended = self.ask({"do": "reap", "pids": pids, "timeout_s": 3.0})["ended"]
        left = [pid for pid, code in ended.items() if code is None]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            ended.update(self.ask({"do": "reap", "pids": left, "timeout_s": 3.0})["ended"])
        for member in report.members:
            member.exit_code = ended[member.pid]
            member.channel.close()
