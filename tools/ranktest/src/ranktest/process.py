"""Calls with which a forked process sets itself up: `lead_group()` for example; and `kill`, which ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone (Linux; elsewhere the closed socket has to do)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def lead_group() -> None:
    """Lead an own process group, so that started helpers end with it."""
    os.setpgid(0, 0)


def kill(pid: int) -> None:
    """End a process that leads a group, and what is left of it."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def send_output_to(file: str) -> None:
    """Write everything this process prints, from Python or C, into a file; read nothing."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - open until the process ends
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
