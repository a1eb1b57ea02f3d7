"""Describe, check, compute, explain, compare and apply how a model's tensors lie on ranks.

Names are loaded when they are first used: importing this package imports neither torch nor
``torch.distributed.tensor``, so that ``shard-spec --help`` answers at once. ``MeshSpec``, ``Box``, ``Layout`` and plans
never need the latter; the placement classes ``Shard``, ``Replicate`` and ``Partial`` are torch's and do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shard_spec.__about__ import __version__

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

    from shard_spec.boxes import Box
    from shard_spec.layout import Layout
    from shard_spec.mesh import MeshSpec
    from shard_spec.placements import BlockShard, InterleavedShard, PlacementLike, UnevenShard
    from shard_spec.problems import PlanError, Problem

# Public name -> module that has it. One line for each name that `__all__` lists.
_HOME = {
    "MeshSpec": "shard_spec.mesh",
    "Box": "shard_spec.boxes",
    "Layout": "shard_spec.layout",
    "Placement": "shard_spec.placements",
    "Shard": "shard_spec.placements",
    "Replicate": "shard_spec.placements",
    "Partial": "shard_spec.placements",
    "UnevenShard": "shard_spec.placements",
    "BlockShard": "shard_spec.placements",
    "InterleavedShard": "shard_spec.placements",
    "PlacementLike": "shard_spec.placements",
    "PlanError": "shard_spec.problems",
    "Problem": "shard_spec.problems",
}

__all__ = [
    "MeshSpec",
    "Box",
    "Layout",
    "Placement",
    "Shard",
    "Replicate",
    "Partial",
    "UnevenShard",
    "BlockShard",
    "InterleavedShard",
    "PlacementLike",
    "PlanError",
    "Problem",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shard_spec' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
