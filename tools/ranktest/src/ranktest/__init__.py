"""Test bodies that run on many ranks.

Everything here is reached lazily, so that loading the pytest plugin does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktest.ranks import Ranks as Ranks
    from ranktest.recording import Event as Event
    from ranktest.recording import Log as Log

_WHERE = {
    "Ranks": "ranktest.ranks",
    "Event": "ranktest.recording",
    "Log": "ranktest.recording",
}

__all__ = ["Ranks", "Event", "Log"]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ranktest' has no attribute {name!r}")
