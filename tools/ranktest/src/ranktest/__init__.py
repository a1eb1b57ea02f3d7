"""A pytest plugin for programs that communicate: test bodies on several ranks, and means to watch what they send.

Names are imported when they are first used, so that loading the plugin does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktest.calls import functions_entered as functions_entered
    from ranktest.compiler import warm_up_compiler as warm_up_compiler
    from ranktest.fake import FakeCudaError as FakeCudaError
    from ranktest.fake import fake_cuda as fake_cuda
    from ranktest.fake import fake_mesh as fake_mesh
    from ranktest.ranks import Ranks as Ranks
    from ranktest.recording import Event as Event
    from ranktest.recording import Log as Log

__all__ = ["Ranks", "Event", "Log", "fake_cuda", "fake_mesh", "FakeCudaError", "functions_entered", "warm_up_compiler"]

_MODULES = ("ranks", "recording", "recording", "fake", "fake", "fake", "calls", "compiler")  # one for each name


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(f"ranktest.{_MODULES[__all__.index(name)]}"), name)
    raise AttributeError(f"module 'ranktest' has no attribute {name!r}")
