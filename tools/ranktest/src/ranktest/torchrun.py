"""Engine two: pytest runs in every process that torchrun started.

Rank 0 runs pytest as usual and reports. The other processes collect the same tests, run none of their fixtures, and
follow rank 0 through torchrun's own store: for a `@ranks(n)` test rank 0 publishes the job, every process with a rank
below n forks itself to be that rank, watches its fork, and publishes what became of it; then rank 0 judges and
publishes its reports, which the others count as their own, so that all leave with the same exit code. Because bodies
run in forks, a body that hangs or dies costs its own test only.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import tempfile
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ranktest import body, supervise
from ranktest.body import PRELOAD
from ranktest.job import Job, Meeting
from ranktest.supervise import Child, Member, Report

#: How long a process waits for the others to collect their tests.
COLLECT_S = 600.0


def is_torchrun() -> bool:
    """Whether this process was started by torchrun."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"))


class World:
    """The processes that torchrun started, as one of them sees them."""

    def __init__(self, config: pytest.Config) -> None:
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.host, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix=f"ranktest-{self.rank}-"))
        self.num_jobs = 0
        self.num_items = 0
        self.num_messages = 0
        self.kept = False
        self._store: Any = None
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # keep CUDA uninitialised until the fork
        body.configure(config)

    @property
    def store(self) -> Any:
        """Torchrun's store, with keys of this run's tests."""
        if self._store is None:
            from ranktest import _torch_compat as compat

            body.preload(PRELOAD)
            serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            base = compat.TCPStore(
                self.host, self.port, None, serves, timeout=timedelta(seconds=30), wait_for_workers=False
            )
            self._store = compat.PrefixStore(f"ranktest/{restarts}", base)
        return self._store

    # ---- messages
    def put(self, key: str, value: Any) -> None:
        """Publish a value."""
        self.store.set(key, pickle.dumps(value))

    def get(self, key: str, timeout_s: float | None = None) -> Any:
        """Wait for a value; without a limit torchrun ends us if its publisher dies."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.001
        while not self.store.check([key]):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: nothing published under {key!r} for {timeout_s} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return pickle.loads(self.store.get(key))

    def agree_on_tests(self, items: list[pytest.Item]) -> None:
        """Check that every process collected the same tests in the same order.

        Raises:
            pytest.UsageError: they did not; on every rank.
        """
        names = "\n".join(item.nodeid for item in items)
        self.put(f"collected/{self.rank}", (len(items), hashlib.sha256(names.encode()).hexdigest()))
        found = [self.get(f"collected/{rank}", COLLECT_S) for rank in range(self.size)]
        if len(set(found)) > 1:
            counts = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in enumerate(found))
            raise pytest.UsageError(f"the processes collected different tests ({counts}); nothing was run")

    # ---- rank 0
    def run(self, job: Job) -> Report:
        """Run a job on the first `job.world_size` ranks; for rank 0."""
        self.num_jobs += 1
        prefix = f"job/{self.num_jobs}"
        self.put(f"item/{self.num_items}/{self._next_message()}", ("job", prefix, job))
        start = time.monotonic()
        mine = self._be_part(prefix, job)
        limit = supervise.LIMIT_S + 60
        others = [self.get(f"{prefix}/member/{rank}", limit) for rank in range(1, job.world_size)]
        return Report([mine, *others], time.monotonic() - start)

    def begin_item(self) -> None:
        """Start counting the messages of the next test."""
        self.num_items += 1
        self.num_messages = 0

    def _next_message(self) -> int:
        self.num_messages += 1
        return self.num_messages

    def end_item(self, reports: list[dict[str, Any]]) -> None:
        """Publish rank 0's reports of a test."""
        self.put(f"item/{self.num_items}/{self._next_message()}", ("reports", reports))

    # ---- the others
    def follow_item(self) -> list[dict[str, Any]]:
        """Take part in the next test as rank 0 says; returns rank 0's reports."""
        self.begin_item()
        while True:
            message = self.get(f"item/{self.num_items}/{self._next_message()}")
            if message[0] == "reports":
                return list(message[1])
            _, prefix, job = message
            if self.rank < job.world_size:
                member = self._be_part(prefix, job)
                self.put(f"{prefix}/member/{self.rank}", member)

    # ---- all
    def _be_part(self, prefix: str, job: Job) -> Member:
        folder = self.folder / prefix.replace("/", "-")
        folder.mkdir()
        job = replace(job, folder=str(folder))
        child = self._fork(prefix, job)
        elsewhere = _Others(self, prefix, job.world_size)
        supervise.watch([child], folder, job.rest_s, supervise.reap_own, elsewhere)
        self.kept |= bool(supervise.clear(folder))
        if child.member.outcome is not None:
            body.learn(child.member.outcome.imported)
        return child.member

    def _fork(self, prefix: str, job: Job) -> Child:
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when a process with threads forks
            pid = os.fork()
        if pid == 0:
            ours.close()
            key = f"ranktest/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{prefix}/group"
            body.become_rank(job, Meeting(self.rank, self.local_rank, self.host, self.port, key), theirs)
        theirs.close()
        return Child(Member(self.rank), pid, ours)

    def leave(self) -> None:
        """Wait until every process is done, so that none ends while another still needs the store."""
        if self._store is not None:
            self.store.add("left", 1)
            deadline = time.monotonic() + 30
            while self.store.add("left", 0) < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
        if not self.kept:
            supervise.clear(self.folder)


class _Others:
    """The other processes' ranks of one job."""

    def __init__(self, world: World, prefix: str, size: int) -> None:
        self.world, self.prefix, self.size = world, prefix, size
        self.told = False

    def failed(self) -> bool:
        return bool(self.world.store.check([f"{self.prefix}/failed"]))

    def tell_failed(self) -> None:
        if not self.told:
            self.told = True
            self.world.store.set(f"{self.prefix}/failed", "1")

    def tell_answered(self) -> None:
        self.world.store.add(f"{self.prefix}/answered", 1)

    def all_answered(self) -> bool:
        return bool(self.world.store.add(f"{self.prefix}/answered", 0) >= self.size)

    def tell_busy(self) -> None:
        self.world.store.add(f"{self.prefix}/busy", 1)

    def busy_count(self) -> int:
        return int(self.world.store.add(f"{self.prefix}/busy", 0))
