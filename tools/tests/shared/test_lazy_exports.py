"""Lazy names are listed, imported once and kept."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from shared.lazy_exports import lazy_exports


def test_lazy_names_are_listed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("lazy_sample")
    home: Any = types.ModuleType("lazy_sample.home")
    home.thing = object()
    monkeypatch.setitem(sys.modules, "lazy_sample", module)
    monkeypatch.setitem(sys.modules, "lazy_sample.home", home)
    module.__getattr__, module.__dir__ = lazy_exports("lazy_sample", {"home": ("thing",)}, ("home",))
    assert dir(module) == ["__version__", "home", "thing"]
    assert module.thing is home.thing
    assert "thing" in vars(module)
    with pytest.raises(AttributeError, match="'lazy_sample' has no attribute 'other'"):
        _ = module.other
