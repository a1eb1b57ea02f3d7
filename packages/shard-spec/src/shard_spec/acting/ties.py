"""Ties to modules outside of the one that is sharded: they would be cut without a word."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import nn

from shard_spec.acting.tensors import tensor_at
from shard_spec.problems import Problem


def tied_outside(module: nn.Module, names: Sequence[str]) -> list[Problem]:
    """The tensors among ``names`` that a module outside of ``module`` has too.

    Asks the garbage collector who refers to them; nothing else knows a module's parents.
    """
    tensors = {name: tensor_at(module, name) for name in names}
    if not _outside_tables(module, list(tensors.values())):
        return []
    gc.collect()  # what is only kept by a cycle does not count
    found = {id(tensor) for table in _outside_tables(module, list(tensors.values())) for tensor in table.values()}
    text = "a module outside of the one that is sharded has the same tensor, and would keep the whole one"
    hint = "call it on a module that holds both"
    return [
        Problem("tied-outside", name, found=text, hint=hint) for name, tensor in tensors.items() if id(tensor) in found
    ]


def _outside_tables(module: nn.Module, tensors: list[Any]) -> list[dict[str, Any]]:
    """The ``_parameters`` and ``_buffers`` of other modules in which some of ``tensors`` stand."""
    if not tensors:
        return []
    inside = {id(table) for each in module.modules() for table in (each._parameters, each._buffers)}
    referrers = gc.get_referrers(*tensors)
    candidates = [each for each in referrers if isinstance(each, dict) and id(each) not in inside]
    if not candidates:
        return []
    tables = set()
    for holder in gc.get_referrers(*candidates):
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(attributes, dict) and "_modules" in attributes:
            tables |= {id(attributes.get("_parameters")), id(attributes.get("_buffers"))}
    return [each for each in candidates if id(each) in tables]
