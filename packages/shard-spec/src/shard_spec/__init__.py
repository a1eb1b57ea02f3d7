"""Describe, check, compute, explain, compare and apply how a model's tensors lie on ranks.

Names are loaded when they are first used: importing this package imports neither torch nor
``torch.distributed.tensor``, so that ``shard-spec --help`` answers at once. ``MeshSpec``, ``Box``, ``Layout`` and plans
never need the latter; the placement classes ``Shard``, ``Replicate`` and ``Partial`` are torch's and do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_spec.__about__ import __version__
from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

    from shard_spec._shared.patterns import Pattern
    from shard_spec._shared.problems import PlanError, Problem
    from shard_spec.apply.apply import apply_plan
    from shard_spec.apply.handle import ShardHandle
    from shard_spec.convert.dcp import CheckpointShard, dcp_state_dict
    from shard_spec.estimate.activations import ActivationEstimate
    from shard_spec.estimate.communication import Communication, Transfer
    from shard_spec.estimate.cost import AlphaBetaCostModel, CostModel, Link, Topology, topology_preset
    from shard_spec.estimate.memory import Memory, OptimizerState
    from shard_spec.layout.intervals import Box
    from shard_spec.layout.layout import Layout
    from shard_spec.layout.mesh import MeshSpec
    from shard_spec.layout.placements import BlockShard, InterleavedShard, PlacementLike, UnevenShard
    from shard_spec.legacy.shard_module import shard_module, shard_parameter
    from shard_spec.optimal import OptimalPlanner, Workload
    from shard_spec.plan.from_module import layout_of_tensor
    from shard_spec.plan.metadata import ModelMetadata, TensorMetadata, metadata_of
    from shard_spec.plan.resolve import Resolution
    from shard_spec.planners.base import (
        ComposedPlanner,
        LayoutPlanner,
        OptimalityBound,
        PlannedSharding,
        ShardingPlanner,
        compose,
    )
    from shard_spec.planners.fully_shard import FullyShardPlanner
    from shard_spec.planners.megatron import MegatronPlanner
    from shard_spec.report.diff import Change, PlanDiff
    from shard_spec.sharding_plan import ShardingPlan
    from shard_spec.specs.base import ShardingSpec
    from shard_spec.specs.enumerable import ChunkShardingSpec, EnumerableShardingSpec
    from shard_spec.specs.shards import RemoteDevice, Sharder, ShardMetadata, TensorShards
    from shard_spec.specs.torch_specs import from_torch, to_torch

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
    "ShardingPlan",
    "Resolution",
    "Pattern",
    "ModelMetadata",
    "TensorMetadata",
    "metadata_of",
    "Memory",
    "OptimizerState",
    "ActivationEstimate",
    "Communication",
    "Transfer",
    "PlanDiff",
    "Change",
    "layout_of_tensor",
    "ShardingSpec",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "ShardMetadata",
    "TensorShards",
    "RemoteDevice",
    "Sharder",
    "from_torch",
    "to_torch",
    "Topology",
    "Link",
    "CostModel",
    "AlphaBetaCostModel",
    "topology_preset",
    "CheckpointShard",
    "dcp_state_dict",
    "shard_module",
    "shard_parameter",
    "apply_plan",
    "ShardHandle",
    "ShardingPlanner",
    "LayoutPlanner",
    "ComposedPlanner",
    "compose",
    "PlannedSharding",
    "OptimalityBound",
    "MegatronPlanner",
    "FullyShardPlanner",
    "OptimalPlanner",
    "Workload",
    "__version__",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "layout.mesh": ("MeshSpec",),
        "layout.intervals": ("Box",),
        "layout.layout": ("Layout",),
        "layout.placements": (
            "Placement",
            "Shard",
            "Replicate",
            "Partial",
            "UnevenShard",
            "BlockShard",
            "InterleavedShard",
            "PlacementLike",
        ),
        "_shared.problems": ("PlanError", "Problem"),
        "sharding_plan": ("ShardingPlan",),
        "plan.resolve": ("Resolution",),
        "_shared.patterns": ("Pattern",),
        "plan.metadata": ("ModelMetadata", "TensorMetadata", "metadata_of"),
        "estimate.memory": ("Memory", "OptimizerState"),
        "estimate.activations": ("ActivationEstimate",),
        "estimate.communication": ("Communication", "Transfer"),
        "report.diff": ("PlanDiff", "Change"),
        "plan.from_module": ("layout_of_tensor",),
        "specs.base": ("ShardingSpec",),
        "specs.enumerable": ("ChunkShardingSpec", "EnumerableShardingSpec"),
        "specs.shards": ("ShardMetadata", "TensorShards", "RemoteDevice", "Sharder"),
        "specs.torch_specs": ("from_torch", "to_torch"),
        "estimate.cost": ("Topology", "Link", "topology_preset", "CostModel", "AlphaBetaCostModel"),
        "convert.dcp": ("CheckpointShard", "dcp_state_dict"),
        "legacy.shard_module": ("shard_module", "shard_parameter"),
        "apply.apply": ("apply_plan",),
        "apply.handle": ("ShardHandle",),
        "planners.base": (
            "ShardingPlanner",
            "LayoutPlanner",
            "ComposedPlanner",
            "compose",
            "PlannedSharding",
            "OptimalityBound",
        ),
        "planners.megatron": ("MegatronPlanner",),
        "planners.fully_shard": ("FullyShardPlanner",),
        "optimal": ("OptimalPlanner", "Workload"),
    },
    ("planners", "optimal", "specs"),
)
