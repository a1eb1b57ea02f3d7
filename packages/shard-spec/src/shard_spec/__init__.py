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

    from shard_spec._shared.patterns import Pattern
    from shard_spec._shared.problems import PlanError, Problem
    from shard_spec.acting.apply import apply_plan
    from shard_spec.acting.handle import ShardHandle
    from shard_spec.acting.module import shard_module, shard_parameter
    from shard_spec.boxes import Box
    from shard_spec.convert.dcp import CheckpointShard
    from shard_spec.cost.model import AlphaBetaCostModel, CostModel
    from shard_spec.cost.presets import topology_preset
    from shard_spec.cost.topology import Link, Topology
    from shard_spec.layout import Layout
    from shard_spec.mesh import MeshSpec
    from shard_spec.placements import BlockShard, InterleavedShard, PlacementLike, UnevenShard
    from shard_spec.plan.activations import ActivationEstimate
    from shard_spec.plan.communication import Communication, Transfer
    from shard_spec.plan.diff import Change, PlanDiff
    from shard_spec.plan.facts import ModelFacts, TensorFacts, facts_of
    from shard_spec.plan.from_module import layout_of_tensor
    from shard_spec.plan.memory import Memory
    from shard_spec.plan.optimizers import OptimizerState
    from shard_spec.plan.resolve import Resolution
    from shard_spec.planners.balanced import BalancedPlanner
    from shard_spec.planners.base import ComposedPlanner, LayoutPlanner, PlannedSharding, ShardingPlanner, compose
    from shard_spec.planners.certificate import Certificate
    from shard_spec.planners.fully_shard import FullyShardPlanner
    from shard_spec.planners.megatron import MegatronPlanner
    from shard_spec.planners.optimal import OptimalPlanner, Workload
    from shard_spec.sharding_plan import ShardingPlan
    from shard_spec.specs.base import ShardingSpec
    from shard_spec.specs.chunk import ChunkShardingSpec
    from shard_spec.specs.devices import RemoteDevice
    from shard_spec.specs.enumerable import EnumerableShardingSpec
    from shard_spec.specs.sharder import Sharder
    from shard_spec.specs.shards import ShardMetadata, TensorShards
    from shard_spec.specs.torch_specs import from_torch, to_torch

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
    "PlanError": "shard_spec._shared.problems",
    "Problem": "shard_spec._shared.problems",
    "ShardingPlan": "shard_spec.sharding_plan",
    "Resolution": "shard_spec.plan.resolve",
    "Pattern": "shard_spec._shared.patterns",
    "ModelFacts": "shard_spec.plan.facts",
    "TensorFacts": "shard_spec.plan.facts",
    "facts_of": "shard_spec.plan.facts",
    "Memory": "shard_spec.plan.memory",
    "OptimizerState": "shard_spec.plan.optimizers",
    "ActivationEstimate": "shard_spec.plan.activations",
    "Communication": "shard_spec.plan.communication",
    "Transfer": "shard_spec.plan.communication",
    "PlanDiff": "shard_spec.plan.diff",
    "Change": "shard_spec.plan.diff",
    "layout_of_tensor": "shard_spec.plan.from_module",
    "ShardingSpec": "shard_spec.specs.base",
    "ChunkShardingSpec": "shard_spec.specs.chunk",
    "EnumerableShardingSpec": "shard_spec.specs.enumerable",
    "ShardMetadata": "shard_spec.specs.shards",
    "TensorShards": "shard_spec.specs.shards",
    "RemoteDevice": "shard_spec.specs.devices",
    "Sharder": "shard_spec.specs.sharder",
    "from_torch": "shard_spec.specs.torch_specs",
    "to_torch": "shard_spec.specs.torch_specs",
    "Topology": "shard_spec.cost.topology",
    "Link": "shard_spec.cost.topology",
    "CostModel": "shard_spec.cost.model",
    "AlphaBetaCostModel": "shard_spec.cost.model",
    "topology_preset": "shard_spec.cost.presets",
    "CheckpointShard": "shard_spec.convert.dcp",
    "shard_module": "shard_spec.acting.module",
    "shard_parameter": "shard_spec.acting.module",
    "apply_plan": "shard_spec.acting.apply",
    "ShardHandle": "shard_spec.acting.handle",
    "ShardingPlanner": "shard_spec.planners.base",
    "LayoutPlanner": "shard_spec.planners.base",
    "ComposedPlanner": "shard_spec.planners.base",
    "compose": "shard_spec.planners.base",
    "PlannedSharding": "shard_spec.planners.base",
    "Certificate": "shard_spec.planners.certificate",
    "MegatronPlanner": "shard_spec.planners.megatron",
    "FullyShardPlanner": "shard_spec.planners.fully_shard",
    "BalancedPlanner": "shard_spec.planners.balanced",
    "OptimalPlanner": "shard_spec.planners.optimal",
    "Workload": "shard_spec.planners.optimal",
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
    "ShardingPlan",
    "Resolution",
    "Pattern",
    "ModelFacts",
    "TensorFacts",
    "facts_of",
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
    "shard_module",
    "shard_parameter",
    "apply_plan",
    "ShardHandle",
    "ShardingPlanner",
    "LayoutPlanner",
    "ComposedPlanner",
    "compose",
    "PlannedSharding",
    "Certificate",
    "MegatronPlanner",
    "FullyShardPlanner",
    "BalancedPlanner",
    "OptimalPlanner",
    "Workload",
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
