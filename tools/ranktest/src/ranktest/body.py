"""Code that runs inside a rank: it imports the test module as pytest would, runs one body and sends the outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from ranktest import _pytest_compat as compat
from ranktest import process
from ranktest.job import Job, Meeting, Outcome

#: Imported before the first fork, because most bodies would import them.
PRELOAD = (
    *("torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"),
    *("ranktest.groups", "ranktest.ranks", "ranktest.intercept"),
)

_config: Any = None
_modules: dict[str, ModuleType] = {}


def configure(config: Any) -> None:
    """Set the pytest configuration that test modules are imported under (assertion rewriting, import mode)."""
    global _config
    _config = config


def preload(names: tuple[str, ...]) -> None:
    """Import torch and ranktest's modules before the first fork, so that no rank has to."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        importlib.import_module(name)
    sys.modules["ranktest.intercept"].install()
    gc.set_threshold(50_000, 20, 100)  # new objects, in place of 700: a trace makes millions that stay
    gc.collect()
    gc.freeze()


def learn(names: Iterable[str]) -> None:
    """Import modules that earlier bodies were the first to import, so that ranks forked later find them."""
    new = [name for name in names if name not in sys.modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in new:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if new:
        gc.collect()
        gc.freeze()


def _imported_since(before: set[str]) -> tuple[str, ...]:
    """Names of modules imported since, from files; those that torch's compiler generated are left out."""
    generated = os.path.realpath(tempfile.gettempdir())

    def lasting(name: str) -> bool:
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is None or spec.name != name or not spec.has_location:
            return False
        return not os.path.realpath(str(spec.origin)).startswith(generated)

    return tuple(name for name in list(sys.modules) if name not in before and lasting(name))


def load_module(path: str) -> ModuleType:
    """Import a test module by path, with pytest's assertion rewriting, once; then call its `before_ranks()`.

    Ranks that are forked later find what the function has done: `warm_up_compiler`, for example, has traced a step.
    """
    if path not in _modules:
        with _warning_filters(()):
            _modules[path] = compat.import_test_module(_config, Path(path))
        getattr(_modules[path], "before_ranks", tuple)()
    return _modules[path]


def become_rank(job: Job, meeting: Meeting, channel: Connection) -> NoReturn:
    """Run one rank of a job in this forked process, answer on `channel`, and end."""
    code = 70
    try:
        process.die_with_parent()
        process.lead_group()
        process.send_output_to(os.path.join(job.folder, f"{meeting.rank}.output"))
        stacks = open(os.path.join(job.folder, f"{meeting.rank}.stack"), "w")  # noqa: SIM115 - open until the end
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        channel.send(_outcome(job, meeting))
        with contextlib.suppress(EOFError, OSError):
            channel.recv()  # keep sockets open until every rank has answered
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _outcome(job: Job, meeting: Meeting) -> Outcome:
    before = set(sys.modules)
    try:
        _run(job, meeting)
    except BaseException as problem:
        try:
            return compat.outcome_of(_config, meeting.rank, problem, job)
        except Exception:
            return Outcome(meeting.rank, "failed", traceback.format_exc(), repr(problem))
    return Outcome(meeting.rank, "passed", imported=_imported_since(before))


def _run(job: Job, meeting: Meeting) -> None:
    import torch

    from ranktest import groups, intercept
    from ranktest.checks import GlooChecks
    from ranktest.ranks import Ranks

    # torch makes its pool of threads anew after a fork, when it is first asked for. In CUDA builds autograd's threads
    # would all ask at once, and some find none ("Invalid thread pool!", the process aborts): ask before them.
    torch.set_num_threads(1)
    module = load_module(job.path)
    with _warning_filters(job.filterwarnings), compat.assertion_details(_config):
        funcargs = pickle.loads(job.funcargs)
        device = groups.join(job, meeting)
        _seed(job.seed)
        intercept.install()
        intercept.add(GlooChecks())
        if job.ranks_argument:
            funcargs["ranks"] = Ranks(meeting.rank, job.world_size, device, job.placement.backend)
        if job.debugger and job.debugger[0] == meeting.rank:
            _await_debugger(job.debugger[1])
        with _nothing_ignored():
            _function(module, job.qualname)(**funcargs)


def _await_debugger(port: int) -> None:
    """Listen on a port of this machine until an editor has attached: VS Code's "attach", for example."""
    import debugpy

    debugpy.listen(("127.0.0.1", port))
    debugpy.wait_for_client()


@contextlib.contextmanager
def _nothing_ignored() -> Iterator[None]:
    """Turn exceptions that Python can only print (`__del__`, threads) into warnings, so errors."""
    ignored: list[tuple[type[Warning], str]] = []

    def unraisable(args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        ignored.append(
            (pytest.PytestUnraisableExceptionWarning, f"{args.err_msg or 'ignored in'}: {args.object!r}\n{text}")
        )

    def in_thread(args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        ignored.append((pytest.PytestUnhandledThreadExceptionWarning, f"in {args.thread}\n{text}"))

    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    yield
    gc.collect()
    for category, text in ignored:
        warnings.warn(text, category, stacklevel=2)


def _function(module: ModuleType, qualname: tuple[str, ...]) -> Any:
    target: Any = module
    for name in qualname:
        if isinstance(target, type):
            target = target()
        target = getattr(target, name)
    return target


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
