"""Test bodies that run on many ranks.

Everything here is reached lazily, so that loading the pytest plugin does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktest.calls import functions_entered as functions_entered
    from ranktest.fake import FakeCudaError as FakeCudaError
    from ranktest.fake import fake_cuda as fake_cuda
    from ranktest.fake import fake_mesh as fake_mesh
    from ranktest.ranks import Ranks as Ranks
    from ranktest.recording import Event as Event
    from ranktest.recording import Log as Log

_WHERE = {
    "Ranks": "ranktest.ranks",
    "Event": "ranktest.recording",
    "Log": "ranktest.recording",
    "fake_cuda": "ranktest.fake",
    "fake_mesh": "ranktest.fake",
    "FakeCudaError": "ranktest.fake",
    "functions_entered": "ranktest.calls",
}

__all__ = ["Ranks", "Event", "Log", "fake_cuda", "fake_mesh", "FakeCudaError", "functions_entered"]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ranktest' has no attribute {name!r}")
