"""Counts the functions of a package that a call enters, for tests that keep the main path short."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def functions_entered(package: ModuleType, call: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Count how often `call` enters each function of `package`, by file and name; comprehensions are left out."""
    folder = str(Path(str(package.__file__)).parent)
    entered: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(folder):
            entered[code.co_filename.removeprefix(folder), code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
