"""Describe, validate, cost, explain, compare and apply sharding layouts of a model.

Names are loaded on first use: importing this package imports neither torch nor ``torch.distributed.tensor``, so
``shard-spec --help`` answers at once. ``MeshSpec``, ``Box``, ``Layout`` and plans never need the latter; the placement
classes ``Shard``, ``Replicate`` and ``Partial`` are torch's and do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_spec.__about__ import __version__ as __version__
from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    from shard_spec._shared.problems import PlanError, Problem
    from shard_spec.apply.apply import apply_plan
    from shard_spec.convert.dcp import dcp_state_dict
    from shard_spec.estimate.communication import topology_preset
    from shard_spec.estimate.optimizers import OptimizerState
    from shard_spec.layout.layout import Box, Layout
    from shard_spec.layout.mesh import MeshSpec
    from shard_spec.layout.placements import BlockShard, InterleavedShard, UnevenShard
    from shard_spec.legacy.shard_module import shard_module, shard_parameter
    from shard_spec.optimal import OptimalPlanner
    from shard_spec.plan.resolve import metadata_of
    from shard_spec.planners.base import FullyShardPlanner, LayoutPlanner, ShardingPlanner, compose
    from shard_spec.planners.megatron import MegatronPlanner
    from shard_spec.sharding_plan import ShardingPlan
    from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, Sharder, ShardingSpec, ShardMetadata

__all__ = [
    "MeshSpec",
    "Box",
    "Layout",
    "Shard",
    "Replicate",
    "Partial",
    "UnevenShard",
    "BlockShard",
    "InterleavedShard",
    "PlanError",
    "Problem",
    "ShardingPlan",
    "metadata_of",
    "OptimizerState",
    "ShardingSpec",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "ShardMetadata",
    "Sharder",
    "topology_preset",
    "dcp_state_dict",
    "shard_module",
    "shard_parameter",
    "apply_plan",
    "ShardingPlanner",
    "LayoutPlanner",
    "compose",
    "MegatronPlanner",
    "FullyShardPlanner",
    "OptimalPlanner",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "layout.mesh": ("MeshSpec",),
        "layout.layout": ("Box", "Layout"),
        "layout.placements": ("Shard", "Replicate", "Partial", "UnevenShard", "BlockShard", "InterleavedShard"),
        "_shared.problems": ("PlanError", "Problem"),
        "sharding_plan": ("ShardingPlan",),
        "plan.resolve": ("metadata_of",),
        "estimate.optimizers": ("OptimizerState",),
        "estimate.communication": ("topology_preset",),
        "specs": ("ShardingSpec", "ChunkShardingSpec", "EnumerableShardingSpec", "ShardMetadata", "Sharder"),
        "convert.dcp": ("dcp_state_dict",),
        "legacy.shard_module": ("shard_module", "shard_parameter"),
        "apply.apply": ("apply_plan",),
        "planners.base": ("ShardingPlanner", "LayoutPlanner", "compose", "FullyShardPlanner"),
        "planners.megatron": ("MegatronPlanner",),
        "optimal": ("OptimalPlanner",),
    },
    ("planners", "optimal", "specs"),
)
