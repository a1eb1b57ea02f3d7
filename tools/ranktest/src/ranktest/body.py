"""Inside a rank: import the test module as pytest would, run one body, say how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ranktest import _pytest_compat as compat
from ranktest import wire
from ranktest.job import Job, Outcome

_config: Any = None
_modules: dict[str, ModuleType] = {}


def configure(pytest_args: list[str]) -> None:
    """Make the pytest configuration that test modules are imported under (assertion rewriting, import mode)."""
    global _config
    _config = compat.make_config(pytest_args)


def preload(names: list[str]) -> None:
    """Import what rank processes would otherwise each import on their own."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        importlib.import_module(name)
    for name in ("groups", "ranks", "intercept"):
        importlib.import_module(f"ranktest.{name}")
    sys.modules["ranktest.intercept"].install()
    gc.collect()
    gc.freeze()


def load_module(path: str) -> ModuleType:
    """Import a test module by path, with pytest's assertion rewriting, once."""
    if path not in _modules:
        with _warning_filters(()):
            _modules[path] = compat.import_test_module(_config, Path(path))
    return _modules[path]


def run_rank(job: Job, rank: int, channel: socket.socket, port: int, listen_fd: int | None) -> int:
    """Run one rank of a job and answer on `channel`; returns the exit code."""
    _send_output_to(job.folder, rank)
    stacks = open(os.path.join(job.folder, f"{rank}.stack"), "w")  # noqa: SIM115 - open until the process ends
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    outcome = _outcome(job, rank, port, listen_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    wire.send(channel, outcome)
    with contextlib.suppress(EOFError):
        wire.receive(channel)  # stay, sockets open, until every rank has answered
    return 0


def _send_output_to(folder: str, rank: int) -> None:
    fd = os.open(os.path.join(folder, f"{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - open until the process ends
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _outcome(job: Job, rank: int, port: int, listen_fd: int | None) -> Outcome:
    from ranktest import groups, intercept
    from ranktest.checks import GlooChecks
    from ranktest.ranks import Ranks

    try:
        module = load_module(job.path)
        funcargs = pickle.loads(job.funcargs)
        _seed(job.seed)
        with _warning_filters(job.filterwarnings), compat.assertion_details(_config):
            intercept.add(GlooChecks())
            groups.join(rank, job.world_size, port, listen_fd, job.group_timeout_s)
            if job.ranks_argument:
                funcargs["ranks"] = Ranks.of_default_group()
            _function(module, job.qualname)(**funcargs)
    except BaseException as problem:
        try:
            return compat.outcome_of(_config, rank, problem, job)
        except Exception:
            return Outcome(rank, "failed", traceback.format_exc(), repr(problem))
    return Outcome(rank, "passed")


def _function(module: ModuleType, qualname: tuple[str, ...]) -> Any:
    found: Any = module
    for name in qualname:
        if isinstance(found, type):
            found = found()
        found = getattr(found, name)
    return found


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def _warning_filters(extra: tuple[str, ...]) -> Iterator[None]:
    with warnings.catch_warnings():
        compat.apply_warning_filters(_config, extra)
        yield
